"""--policy: the severity of each check as data, so that a site raises, lowers or leaves out what it wants.

A rule holds for the warnings and failures of a check: they get the rule's severity. What passed or is unknown
stays so: a policy accuses nobody without evidence.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.host import files
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.units import printable
from trainer_launch.preflight import registry
from trainer_launch.preflight.external_check import EXTERNAL

OBSERVE, OFF = "observe", "off"
_SEVERITIES: Mapping[str, tuple[Status, Fault | None] | None] = {
    OFF: None,
    "warn": (Status.WARN, None),
    "fail": (Status.FAIL, Fault.NODE),
    "fatal": (Status.FAIL, Fault.JOB),
}
_WORDS = ", ".join(_SEVERITIES)
_MAX_BYTES = 1 << 16
_SHOWN = 60
_EXTERNAL = re.compile(r"external-[a-z0-9-]{1,60}")


class PolicyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file of --policy."""

    rules: Mapping[str, str] = field(default_factory=dict)
    observe: bool | None = None


class Policy(Struct, frozen=True, kw_only=True):
    """The severities that a site gives to checks. Without a rule, a check has its own."""

    rules: Mapping[str, str] = field(default_factory=dict)  # a severity by check
    observe: bool = False  # all checks run, and none fails
    is_off: bool = False  # no check runs

    def leaves_out(self, check: str) -> bool:
        """Whether this check does not run, and its findings are dropped."""
        return self._rule(check) == OFF

    @property
    def off(self) -> tuple[str, ...]:
        """The checks that are left out, by name."""
        return tuple(check for check, severity in self.rules.items() if severity == OFF)

    def graded(self, finding: Finding) -> Finding:
        """The finding with the severity that this policy gives it, which stands beside the check's own."""
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
        """The same for policies of the same rules, however they were written."""
        content = json.dumps((sorted(self.rules.items()), self.observe))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _rule(self, check: str) -> str | None:
        of_all = self.rules.get(EXTERNAL) if check.startswith(f"{EXTERNAL}-") else None
        return self.rules.get(check, of_all)


def parse_flag(text: str | None) -> Policy:
    """The policy of --policy: files, CHECK=SEVERITY, `observe` and `off`, of which the last counts.

    Raises:
        UsageError: a part makes no sense; the sentence names the file and the place in it.
    """
    policy = Policy()
    for word in filter(None, map(str.strip, (text or "").split(","))):
        check, equals, severity = word.partition("=")
        if word.lower().endswith((".toml", ".json")):
            where = f"--policy {printable(word, ' ')}"
            policy = parse_content(files.named(word, where, _MAX_BYTES), where, policy)
        elif equals:
            rule = _checked("--policy", check.strip(), severity.strip())
            policy = replace(policy, rules={**policy.rules, **rule})
        elif word in (OBSERVE, OFF):
            policy = replace(policy, observe=word == OBSERVE, is_off=word == OFF)
        else:
            near = did_you_mean(word, (OBSERVE, OFF))
            expected = f"a file that ends with .toml or .json, CHECK={_WORDS.replace(', ', '|')}, observe or off"
            raise UsageError(f"--policy has {word[:_SHOWN]!r}; expected {expected}{near and f'; {near}'}")
    return policy


def parse_content(content: bytes | str, where: str, before: Policy) -> Policy:
    """The policy of a file over the policy before it; `where` names the file, and so its format.

    Raises:
        UsageError: as `parse_flag`.
    """
    decode: Any = msgspec.toml.decode if where.lower().endswith(".toml") else msgspec.json.decode
    try:
        file = decode(content, type=PolicyFile)
    except ImportError:
        raise UsageError(
            f"{where}: TOML needs Python 3.11 or the package tomli; write the policy as JSON"
        ) from None
    except (ValueError, RecursionError) as problem:  # also of TOML, with line and column
        advice = "expected rules, a severity for each check, and observe, true or false"
        raise UsageError(f"{where}: {printable(str(problem), ' ')[:200]}; {advice}") from None
    rules = dict(before.rules)
    for check, severity in file.rules.items():
        rules |= _checked(where, check, severity)
    observe = before.observe if file.observe is None else file.observe
    return replace(before, rules=rules, observe=observe, is_off=False)


def _checked(where: str, check: str, severity: str) -> dict[str, str]:
    """The rule, if there is such a check and such a severity."""
    if not _EXTERNAL.fullmatch(check) and not registry.is_known(check, where):
        return {}
    if severity not in _SEVERITIES:
        near = did_you_mean(severity, _SEVERITIES)
        expected = f"expected {_WORDS}, got {severity[:_SHOWN]!r}{near and f'; {near}'}"
        raise UsageError(f"{where}: rule {check}: {expected}")
    return {check: severity}
