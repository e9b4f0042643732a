"""--policy: the severity of each check as data, so that a site raises, lowers or leaves out what it wants.

A rule holds for what a check finds: its warnings and failures get the rule's severity. What passed or is unknown
stays so: a policy accuses nobody without evidence.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.host import logs
from trainer_launch.host.files import LiveFiles
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.units import printable

OBSERVE, OFF = "observe", "off"
_SEVERITIES: Mapping[str, tuple[Status, Fault | None] | None] = {
    OFF: None,
    "warn": (Status.WARN, None),
    "fail": (Status.FAIL, Fault.NODE),
    "fatal": (Status.FAIL, Fault.JOB),
}
_WORDS = ", ".join(_SEVERITIES)
_FORMATS = (".toml", ".json")
_MAX_BYTES = 1 << 16
_SHOWN = 60
_EXTERNAL = re.compile(r"external-[a-z0-9-]{1,60}")
EXTERNAL = "external"  # the check of --external-check, and what the names of its findings begin with


class Policy(Struct, frozen=True, kw_only=True):
    """What a site makes of each check. Without rules, each check has its own severity."""

    rules: Mapping[str, str] = field(default_factory=dict)  # a severity by check
    observe: bool = False  # all checks run, and none fails
    is_off: bool = False  # no check runs

    def leaves_out(self, check: str) -> bool:
        """Whether this check is not to run, or what it finds not to be heard."""
        return self._rule(check) == OFF

    @property
    def off(self) -> tuple[str, ...]:
        """The checks that are left out, by name."""
        return tuple(check for check, severity in self.rules.items() if severity == OFF)

    def graded(self, finding: Finding) -> Finding:
        """The finding with the severity that this policy gives it, which is told beside the check's own."""
        severity = _SEVERITIES.get(self._rule(finding.check) or "")
        if self.observe and (severity or (finding.status,))[0] is Status.FAIL:
            severity = _SEVERITIES["warn"]
        if finding.status not in (Status.WARN, Status.FAIL) or severity in (None, (finding.status, finding.fault)):
            return finding
        status, fault = severity
        own = finding.without_policy or finding.severity
        return replace(finding, status=status, fault=fault, without_policy=own)

    @property
    def fingerprint(self) -> str:
        """The same for policies that say the same, however they were written."""
        told = json.dumps((sorted(self.rules.items()), self.observe))
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def _rule(self, check: str) -> str | None:
        of_all = self.rules.get(EXTERNAL) if check.startswith(f"{EXTERNAL}-") else None
        return self.rules.get(check, of_all)


def parse_flag(text: str | None, checks: Collection[str], removed: Collection[str] = ()) -> Policy:
    """The policy of --policy: files, CHECK=SEVERITY, `observe` and `off`, of which the last counts.

    Raises:
        UsageError: one of them makes no sense; the sentence names the file with its line or key.
    """
    policy = Policy()
    for word in filter(None, map(str.strip, (text or "").split(","))):
        check, equals, severity = word.partition("=")
        if word.lower().endswith(_FORMATS):
            where = f"--policy {printable(word, ' ')}"
            policy = parse_content(_content(word, where), where, policy, checks, removed)
        elif equals:
            rule = _checked("--policy", check.strip(), severity.strip(), checks, removed)
            policy = replace(policy, rules={**policy.rules, **rule})
        elif word in (OBSERVE, OFF):
            policy = replace(policy, observe=word == OBSERVE, is_off=word == OFF)
        else:
            near = did_you_mean(word, (OBSERVE, OFF))
            expected = f"a file that ends with .toml or .json, CHECK={_WORDS.replace(', ', '|')}, observe or off"
            raise UsageError(f"--policy has {word[:_SHOWN]!r}; expected {expected}{near and f'; {near}'}")
    return policy


def parse_content(
    content: str, where: str, before: Policy, checks: Collection[str], removed: Collection[str] = ()
) -> Policy:
    """The policy of a file over the one before it; `where` names the file, and so its format.

    Raises:
        UsageError: as `parse_flag`.
    """
    try:
        told = _toml(content) if where.lower().endswith(".toml") else _json(content)
    except ValueError as problem:  # of TOML and of JSON alike: with line and column
        raise UsageError(f"{where}: {str(problem)[:200]}") from None
    if not isinstance(told, dict):
        raise UsageError(f"{where}: expected an object with the keys rules and observe, got {_kind(told)}")
    for key in told:
        if key not in ("rules", OBSERVE):
            near = did_you_mean(key, ("rules", OBSERVE)) or ("" if key not in checks else "checks belong to rules;")
            raise UsageError(f"{where}: unknown key {key[:_SHOWN]!r}; {near or 'expected'} rules or observe")
    rules, observe = told.get("rules", {}), told.get(OBSERVE, before.observe)
    if not isinstance(observe, bool):
        raise UsageError(f"{where}: observe: expected true or false, got {_kind(observe)}")
    if not isinstance(rules, dict):
        raise UsageError(f"{where}: rules: expected a severity for each check, got {_kind(rules)}")
    made = dict(before.rules)
    for check, severity in rules.items():
        made |= _checked(where, check, severity, checks, removed)
    return replace(before, rules=made, observe=observe, is_off=False)


def _checked(
    where: str, check: str, severity: object, checks: Collection[str], removed: Collection[str]
) -> dict[str, str]:
    """The rule, if there is such a check and such a severity."""
    if check in removed:
        logs.warn(f"check {check} no longer exists; remove it from --policy")
        return {}
    if check not in checks and not _EXTERNAL.fullmatch(check):
        near = did_you_mean(check, checks) or "preflight --list prints all checks"
        raise UsageError(f"{where}: {check[:_SHOWN]!r} is not a check; {near}")
    if not isinstance(severity, str) or severity not in _SEVERITIES:
        shown = repr(severity[:_SHOWN]) if isinstance(severity, str) else _kind(severity)
        near = did_you_mean(severity, _SEVERITIES) if isinstance(severity, str) else ""
        raise UsageError(f"{where}: rule {check}: expected {_WORDS}, got {shown}{near and f'; {near}'}")
    return {check: severity}


def _content(path: str, where: str) -> str:
    data = LiveFiles(_MAX_BYTES + 1).read(path)
    if data is None:
        raise UsageError(f"{where} cannot be read: {_why_not(path)}")
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{where} is larger than {_MAX_BYTES} bytes, which no policy is")
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise UsageError(f"{where}: expected UTF-8 (at line {line})") from None


def _why_not(path: str) -> str:
    try:
        return "permission denied" if stat.S_ISREG(os.stat(path).st_mode) else "it is no regular file"
    except OSError as problem:
        return problem.strerror or str(problem)


def _toml(text: str) -> Any:
    from msgspec import toml  # of Python itself from 3.11 on

    try:
        return toml.decode(text)
    except ImportError:
        raise ValueError("TOML needs Python 3.11 or the package tomli; write the policy as JSON") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except json.JSONDecodeError as problem:
        raise ValueError(f"{problem.msg} (at line {problem.lineno}, column {problem.colno})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    told = dict(pairs)
    if len(told) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:_SHOWN]!r} is there more than once")
    return told


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_KINDS: Mapping[type, str] = {bool: "true or false", str: "a text", list: "a list", dict: "a table"}


def _kind(value: object) -> str:
    other = "a number" if isinstance(value, int | float) else "a date"
    return "nothing" if value is None else _KINDS.get(type(value), other)
