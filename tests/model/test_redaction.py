"""What is hidden of texts and variables that are shown to others."""

from __future__ import annotations

import pytest

from trainer_launch.model.redaction import REDACTED, presentable, redact, redact_command, redact_text

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEAx\nq83nHgUlq83nHgUl=\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("upload to https://me:hunter2@host/x failed", "hunter2"),
        ("Authorization: Bearer hf_abcdefghijklmnop", "hf_abc"),
        ("login with AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("aws_secret_access_key=wJalrXUtnFEMI/K7MDENG", "wJalr"),
        ("wandb_api_key: 0123456789abcdef", "0123456789abcdef"),
        ("password:\n  hunter2", "hunter2"),
        ("the values are\npassword: |\n  first7\n  hunter2\nhost: x", "hunter2"),
        ("[rank1]: password:\n[rank1]:   hunter2", "hunter2"),
        ("[rank1]: token: >-\n[rank1]:   first7\n[rank1]:   hunter2\n[rank1]: host: x", "hunter2"),
        ("MINIO_SECRET_KEY=abcdEfgh1234", "abcdE"),
        ("{'private_key': 'abcdEfgh1234', 'x': 1}", "abcdE"),
        ("passphrase: hunter2", "hunter2"),
        ("{'Authorization': 'Token abcdEfgh1234'}", "abcdE"),
        ("before eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl after", "eyJ"),
        ("AccountName=a;AccountKey=Zm9v+/8=;X=y", "Zm9v"),
        ("Command '['push', '--token', 'abcd1234', 'x']' returned non-zero exit status 1.", "abcd1234"),
        ("POST https://hooks.slack.com/services/T00/B00/XXYY failed", "XXYY"),
        ("https://discord.com/api/webhooks/1234/abcDEF", "abcDEF"),
        ("https://acme.webhook.office.com/webhookb2/1-2@3/IncomingWebhook/4", "IncomingWebhook"),
        ("POST https://api.telegram.org/bot1234567:AAHdqTcvCH1vGWJxf/sendMessage failed", "AAHd"),
        ("{'Authorization': 'x', 'auth': 1} Authorization: Token abcdef123456", "abcdef123456"),
        *((f"login with {begin}abcdefghijkl012 failed", "ghijkl") for begin in ("ya29.", "npm_", "pypi-", "xapp-")),
        *((f"login with {begin}abcdefghijkl012 failed", "ghijkl") for begin in ("ghr_", "xoxe-", "wandb_v1_")),
        (f"cannot use {KEY}; give up", "q83n"),
        (KEY.partition("\n")[2], "q83n"),  # its beginning was cut off
        (KEY[:60], "MIIE"),  # its end was
    ],
)
def test_what_looks_like_a_secret_is_hidden_wherever_it_stands(text: str, secret: str) -> None:
    hidden = redact_text(text)
    assert secret not in hidden
    assert REDACTED in hidden
    assert redact_text(hidden) == hidden


def test_what_stands_around_a_key_is_shown() -> None:
    assert redact_text(f"cannot use {KEY}; give up") == f"cannot use {REDACTED}; give up"


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/docs/transformers/main_classes/trainer",
        "the hook of layer 3 failed",
        "step 4: loss 0.3\nstep 5: loss 0.2",
        "the token count is 4096 tokens",
        "no logit for token: 17 of 32000",
        "commit 0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize(
    "name",
    [
        *("SLACK_WEBHOOK", "DEPLOY_PRIVATE", "STRIPE_API", "TWILIO_SID", "HF_TOKEN", "apiKey", "OPENAI_APIKEY"),
        *("AWS_SECRET_ACCESS_KEY", "MYSQL_PASSWD", "GIT_CREDENTIALS", "client-secret", "GITHUBTOKEN", "KEY"),
        *("KeyOfDoor", "sshPrivateKey", "SSH_KEY_PATH", "storageConnectionString", "CONNECTIONSTRINGS__DB"),
        *("AZURE_DEVOPS_EXT_PAT", "SSHPASS", "SERVICE_JWT"),
    ],
)
def test_a_variable_is_hidden_by_its_name(name: str) -> None:
    assert redact(name, "x" * 12) == REDACTED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_TOKENS", "4096"),
        ("PAD_TOKEN_ID", "0"),
        ("PAD_TOKEN_ID", "-1"),
        ("NUM_KEY_VALUE_HEADS", "8"),
        ("TRAIN_TOKENS", "300B"),
        ("STOP_TOKEN_IDS", "[1, 2, 32000]"),
        ("USE_AUTH_TOKEN", "True"),
        ("AUTH_MODE", "none"),
        ("EOS_TOKEN", "<|endoftext|>"),
        ("MASK_TOKEN", "[MASK]"),
    ],
)
def test_the_numbers_of_a_model_are_shown_also_where_they_count_tokens_and_keys(name: str, value: str) -> None:
    assert redact(name, value) == value
    flag = f"--{name.lower()}"
    assert redact_command(("train.py", flag, value, f"{flag}={value}")) == (
        ("train.py", flag, value, f"{flag}={value}")
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DB_PASSWORD", "1234"),
        ("SECRET", "8"),
        ("DB_PASS", "none"),
        ("ACCESS_TOKEN", "123456789012"),
        ("API_KEY", "4f6c"),
        ("BOT_TOKEN", "110201543:AAHdqTcvCH1v"),
    ],
)
def test_a_password_may_be_a_number_and_a_long_number_a_key(name: str, value: str) -> None:
    assert redact(name, value) == REDACTED
    assert value not in "".join(redact_command((f"--{name.lower()}", value)))


@pytest.mark.parametrize(
    "name",
    ["API_URL", "PRIVATE_IP", "SID", "API", "MONKEY", "PWD", "KEEP_ALIVE", "CONNECTION", "PAT", "PATH", "COMPASS"],
)
def test_a_variable_with_half_of_such_a_name_is_shown(name: str) -> None:
    assert redact(name, "10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("a\x1b]8;;http://x\x1b\\link", "alink"),
        ("bell\x07 back\x08", "bell  back "),
        ("two\nlines\tof it", "two\nlines of it"),
        ("right to left \u202e", "right to left  "),
        ("ends in \x1b", "ends in "),
    ],
)
def test_nothing_of_a_text_commands_a_terminal(text: str, shown: str) -> None:
    assert presentable(text) == shown
