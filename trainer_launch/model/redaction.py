"""Secrets, which must not leave the pod in a bug report: by their names and shapes, and by their looks."""

from __future__ import annotations

import re

from trainer_launch.model.units import printable

REDACTED = "[redacted]"

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_PARTS = frozenset(("key", "keys", "auth", "cookie", "cookies", "sig", "signature", "webhook", "webhooks"))
_PASSWORD_PARTS = frozenset(("pass", "pwd", "passphrase", "sshpass", "cred", "creds"))
_SECRET_LAST = frozenset(("private", "api", "sid", "pat", "jwt"))  # as in STRIPE_API, TWILIO_SID; API_URL is none
_NO_SECRETS = frozenset(("PWD", "OLDPWD"))  # the shell's working directories
# Joined without a separator; for "key" only known forms, because monkey and turkey are no secrets.
_SECRET_ENDS = ("token", "tokens")
_PASSWORD_ENDS = ("password", "passwords", "passwd", "secret", "secrets", "credential", "credentials")
_SECRET_JOINED = re.compile(
    r"(api|access|secret|private|public|ssh|auth|master|license|signing|encryption|shared)keys?"
)
_CONNECTION = re.compile(r"connection_?strings?")  # Azure's and .NET's, which hold an account's key or a password
_PATH_ENDS = frozenset(("file", "files", "path", "paths", "dir", "directory"))
# Trainer v2 calls it TOKEN, but it holds a path.
_PATHS_BY_CONTRACT = frozenset(("KUBEFLOW_TRAINER_SERVER_TOKEN",))
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/-]{1,255}")
# What keys and tokens of models and caches look like, but no secret: MAX_TOKENS=4096, USE_AUTH_TOKEN=true,
# STOP_TOKEN_IDS=[1,2], TRAIN_TOKENS=300B, PAD_TOKEN=<pad>. A password may be a number.
_NUMBER = r"[+-]?\d{1,9}(?:\.\d{0,9})?(?:e[+-]?\d{1,3})?[kmbtg]?"
_PLAIN = re.compile(
    rf"(?i)(?:[\[(]?{_NUMBER}(?:[,x]\s?{_NUMBER}){{0,15}}[\])]?|true|false|yes|no|on|off|none|null|auto"
    r"|<[^\w<>]{0,2}[a-z_]{1,24}[^\w<>]{0,2}>|</?s>|\[[a-z]{2,5}\])"
)

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?", re.DOTALL)
_RANK = r"\[rank\d{1,9}\]:"  # torch's prefix of each line of an error
_PATTERNS = (
    # A key, also without its beginning, or its end, which has been cut off.
    (re.compile(r"-----BEGIN [A-Z0-9 ]+-----[\s\S]*?(?:-----END [A-Z0-9 ]+-----(?:\s*\Z)?|\Z)"), REDACTED),
    (re.compile(r"(?:^[A-Za-z0-9+/=]{16,128}\s){0,64}^-----END [A-Z0-9 ]+-----", re.MULTILINE), REDACTED),
    (  # a webhook's address is its secret
        re.compile(r"""(?i)(https?://[^\s/"']{0,253}?(?:/[^\s/"']{0,99}?){0,4}?hooks?[^\s/"']{0,99}/)[^\s"']+"""),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}://)[^/\s@]+@"), rf"\1{REDACTED}@"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*"), REDACTED),
    (
        re.compile(
            r"\b(gh[oprsu]_|github_pat_|glpat-|hf_|npm_|nvapi-|pypi-|sk-|wandb_v1_|xapp-|xox[a-z]-|ya29\.|"
            r"AKIA|ASIA|AIza)[A-Za-z0-9_-]{12,}"
        ),
        REDACTED,
    ),
    (
        re.compile(
            r"""(?i)((?:password|passwd|passphrase|token(?!["']?\s{0,8}[:=]\s{0,8}\d{1,9}(?![\w:.+/-]))|secret|"""
            r"""(?:api|account|access|secret|private|signing|encryption)[_-]?key)["']?\s{0,8}[:=]"""
            rf"""(?:\s|{_RANK}){{0,8}})"""
            rf"""(?:[|>][+-]?(?:\n(?:{_RANK} )?[ \t]+[^\n]+)+|"[^"]*"|'[^']*'|[^\s,;&}}"']+)"""
        ),
        rf"\1{REDACTED}",
    ),
    (
        re.compile(
            r"(?i)(\bpassword\s+|--[a-z-]{0,32}(?:password|token|secret|api-?key)['\"]?,?\s+['\"]?)[^\s-]\S*"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)([?&](?:[a-z-]{0,32}signature|sig)=)[^\s&]+"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {REDACTED}"),
    (re.compile(r"""(?i)\b(authorization["']?\s{0,8}[:=]\s{0,8}["']?token\s+)[^\s"']+"""), rf"\1{REDACTED}"),
    (re.compile(r"(/bot\d{4,16}:)[A-Za-z0-9_-]{10,}"), rf"\1{REDACTED}"),  # Telegram's
)
_SECRET_FILES = re.compile(
    r"/(var/)?run/secrets/.*|/curve/.*|.*/id_[a-z0-9]+|.*\.(key|pem|p12|pfx)|.*/(job-secret|token|\.netrc|credentials|kubeconfig)"
)
_FLAG = re.compile(r"(?P<name>-{0,2}[A-Za-z_][A-Za-z0-9_.-]{0,127})=(?P<value>.*)", re.DOTALL)


def redact(name: str, value: str) -> str:
    """A variable's value as it may be shown to others."""
    if value and _names_a_secret(name, value) and not _holds_a_path(name, value):
        return REDACTED
    return redact_text(value)


def redact_text(text: str) -> str:
    """Text without what looks like a key, a token or a password in a URL."""
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return text


def presentable(text: str) -> str:
    """A foreign text, fit for a log: no secrets by their looks, no control characters but newlines."""
    return "\n".join(printable(line, " ") for line in redact_text(_ANSI.sub("", text)).split("\n"))


def redact_file(path: str, content: str) -> str:
    """A file's content as it may be shown to others."""
    if content and _SECRET_FILES.fullmatch(path):
        return REDACTED
    return redact_text(content)


def redact_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """A command line as it may be shown: `--token=x`, `TOKEN=x` and `--token x` lose their values."""
    shown: list[str] = []
    flag = ""  # whose value may follow
    for word in command:
        assignment = _FLAG.fullmatch(word)
        if assignment:
            shown.append(f"{assignment['name']}={redact(assignment['name'], assignment['value'])}")
        else:
            shown.append(redact_text(word) if word.startswith("-") else redact(flag, word))
        flag = word if word.startswith("-") and assignment is None else ""
    return tuple(shown)


def _names_a_secret(name: str, value: str) -> bool:
    parts = _parts(name)
    if name in _NO_SECRETS:
        return False
    if _CONNECTION.search("_".join(parts)) or (len(parts) > 1 and parts[-1] in _SECRET_LAST):
        return True
    if any(part in _PASSWORD_PARTS or part.endswith(_PASSWORD_ENDS) for part in parts):
        return True
    return any(map(_is_secret_part, parts)) and _PLAIN.fullmatch(value) is None


def _is_secret_part(part: str) -> bool:
    return part in _SECRET_PARTS or part.endswith(_SECRET_ENDS) or _SECRET_JOINED.search(part) is not None


def _holds_a_path(name: str, value: str) -> bool:
    parts = _parts(name)
    is_path = name in _PATHS_BY_CONTRACT or (parts and parts[-1] in _PATH_ENDS)
    return bool(is_path) and _PLAIN_PATH.fullmatch(value) is not None


def _parts(name: str) -> list[str]:
    """The words of a name: `HF_TOKEN`, `hfToken` and `hf-token` have the same two."""
    return [part.lower() for part in _PARTS.findall(name)]
