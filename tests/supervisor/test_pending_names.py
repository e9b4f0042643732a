"""Waiting for names, with resolvers of our own."""

from __future__ import annotations

import select
import socket
import threading

from trainer_launch.host.dns import PendingNames


def news_until(names, condition):
    """Collect what is said of the names until `condition(opened, texts)`."""
    texts: list[str] = []
    opened = False
    while not condition(opened, texts):
        assert select.select([names.fd], [], [], 10.0)[0], "no news"
        opened, text = names.news(0.0)
        texts += [text] if text else []
    return texts


def test_names_that_come_one_after_the_other():
    asked = {"a": 0, "b": 0}

    def resolver(name):
        asked[name] += 1
        if asked[name] < (1 if name == "a" else 3):
            raise socket.gaierror(-2, "Name or service not known")

    names = PendingNames(["a", "b", "a"], resolver)
    names.start()
    texts = news_until(names, lambda opened, _: opened)
    assert asked == {"a": 1, "b": 3}
    assert [text for text in texts if "b (Name or service not known)" in text]
    assert len(texts) == 1  # the second time only after a while
    names.close()


def test_an_impossible_name_is_an_answer_too():
    names = PendingNames(["." * 300])
    names.start()
    assert "not resolved yet" in news_until(names, lambda _, texts: texts)[0]
    names.close()


def test_it_can_be_closed_while_the_resolver_hangs():
    release, done = threading.Event(), threading.Event()

    def resolver(_name):
        release.wait(10)
        done.set()

    names = PendingNames(["a"], resolver)
    names.start()
    names.close()
    release.set()
    assert done.wait(10)
