"""Progress to Kubeflow's TrainJob status endpoint: a real HTTPS server, its own CA, tokens that rotate."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.observability.statusserver import PATH, StatusServer, is_valid, make_certificates
from trainer_launch.model import StatusEndpoint
from trainer_launch.observability.progress import Progress
from trainer_launch.observability.trainjob_status import Poster, body, send

TOKEN = "eyJhbGciOiJSUzI1NiJ9.first.token"
OTHER = "eyJhbGciOiJSUzI1NiJ9.second.token"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture
def server(certificates: Path) -> Iterator[StatusServer]:
    made = StatusServer(certificates, TOKEN)
    yield made
    made.close()


@pytest.fixture
def endpoint(server: StatusServer, certificates: Path, tmp_path: Path) -> StatusEndpoint:
    (tmp_path / "token").write_text(TOKEN + "\n")
    return StatusEndpoint(
        scheme="https",
        server_host="localhost",
        server_port=server.port,
        path=PATH,
        ca_file=str(certificates / "ca.crt"),
        token_file=str(tmp_path / "token"),
    )


def at(progress: float | None, **metrics: float) -> Progress:
    return Progress(
        rank=0, local_rank=0, pid=1, at_s=1.0, time_s=1e9, progress=progress, eta_s=59.5, metrics=metrics
    )


class Training:
    """What a poster is told."""

    def __init__(self) -> None:
        self.latest: Progress | None = None

    def __call__(self) -> Progress | None:
        return self.latest


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def poster(endpoint: StatusEndpoint, training: Training) -> Iterator[Poster]:
    made = Poster(endpoint, training, every_s=0.02)
    made.start()
    yield made
    made.close(10.0, succeeded=False)


def test_a_body_has_the_endpoints_form() -> None:
    assert json.loads(body(at(0.129, loss=0.5, step=7), finished=False)) == {
        "trainerStatus": {
            "lastUpdatedTime": "2001-09-09T01:46:40Z",
            "metrics": [{"name": "loss", "value": "0.5"}, {"name": "step", "value": "7"}],
            "progressPercentage": 12,
            "estimatedRemainingSeconds": 60,
        }
    }
    assert b'"progressPercentage": 100, "estimatedRemainingSeconds": 0' in body(at(0.4), finished=True)
    assert b"progressPercentage" not in body(at(None), finished=False)


@given(
    st.floats(0, 1),
    st.floats(0, 1e15),
    st.dictionaries(st.text(min_size=1, max_size=64), st.floats(), max_size=256),
)
def test_any_report_is_within_the_endpoints_limits(part: float, eta_s: float, metrics: dict[str, float]) -> None:
    made = body(replace(at(part), eta_s=eta_s, metrics=metrics), finished=False)
    assert is_valid(json.loads(made)["trainerStatus"])
    assert json.loads(made, parse_constant=pytest.fail)


def test_progress_is_posted_when_it_is_new_and_the_end_is_100_percent(
    server: StatusServer, training: Training, poster: Poster
) -> None:
    training.latest = at(0.25, loss=0.5)
    server.await_(lambda: server.posted)
    training.latest = at(0.5)
    server.await_(lambda: len(server.posted) == 2)
    poster.close(10.0, succeeded=True)
    assert [status["progressPercentage"] for status in server.posted] == [25, 50, 100]
    assert server.posted[0]["metrics"] == [{"name": "loss", "value": "0.5"}]


def test_a_token_that_was_rotated_is_read_anew(
    server: StatusServer, endpoint: StatusEndpoint, training: Training, poster: Poster
) -> None:
    training.latest = at(0.1)
    server.await_(lambda: server.posted)
    Path(endpoint.token_file).write_text(OTHER)
    server.tokens = {OTHER}
    training.latest = at(0.2)
    server.await_(lambda: len(server.posted) == 2)


def test_a_server_in_trouble_is_asked_again(
    server: StatusServer, training: Training, poster: Poster, caplog: pytest.LogCaptureFixture
) -> None:
    server.script = [500, 403, 500, 429]
    training.latest = at(0.1)
    server.await_(lambda: server.posted)
    assert server.requests == 5
    assert [caplog.text.count(f"the server answered {code}") for code in (500, 403, 429)] == [1, 1, 1]
    assert TOKEN not in caplog.text


def test_a_server_that_hangs_holds_up_neither_the_job_nor_its_end(
    server: StatusServer, training: Training, poster: Poster
) -> None:
    server.hang.clear()
    training.latest = at(0.1)
    started_s = time.monotonic()
    poster.close(0.2, succeeded=True)
    assert time.monotonic() - started_s < 30
    server.hang.set()


def test_no_token_goes_to_a_server_that_the_ca_did_not_sign(
    server: StatusServer, endpoint: StatusEndpoint, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    make_certificates(other)
    for change in ({"ca_file": str(other / "ca.crt")}, {"server_host": "127.0.0.1"}):  # the name counts
        assert "certificate" in send(replace(endpoint, **change), body(at(0.1), finished=False))
    assert server.requests == 0


def test_no_token_goes_over_plain_http(
    server: StatusServer, endpoint: StatusEndpoint, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    poster = Poster(replace(endpoint, scheme="http"), training, every_s=0.01)
    poster.start()
    training.latest = at(0.1)
    poster.close(1.0, succeeded=True)
    assert server.requests == 0
    assert "does not use https" in caplog.text


@pytest.mark.parametrize("content", [None, "", "two words here", "line\nbreak: yes", "x" * 100 + "\n!"])
def test_a_token_file_that_holds_none_is_told_unshown(
    server: StatusServer, endpoint: StatusEndpoint, content: str | None
) -> None:
    path = Path(endpoint.token_file)
    path.unlink() if content is None else path.write_text(content)
    why = send(endpoint, body(at(0.1), finished=False))
    assert "no valid token" in why
    assert not content or content[:8] not in why
    assert server.requests == 0


@pytest.mark.parametrize("change", [{"ca_file": "/nonexistent"}, {"ca_file": "/dev/null"}, {"server_port": 1}])
def test_what_cannot_be_reached_has_a_reason(endpoint: StatusEndpoint, change: dict[str, object]) -> None:
    assert send(replace(endpoint, **change), body(at(0.1), finished=False))
