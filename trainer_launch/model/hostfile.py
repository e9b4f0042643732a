"""Lists of hosts as MPI, horovod and Flux write them: text to members, and members to text.

A line that says something unknown is refused with its number: a host that is silently left out costs a whole run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from trainer_launch.model import Member
from trainer_launch.model.value_parsers import MAX_COUNT, bad_value, named, parse_host, parse_number

MAX_HOSTS = 65_536

_OPEN_MPI = "HOST, or HOST slots=N, with max_slots=M when wanted"
_HYDRA = "HOST or HOST:N"
_WORD = re.compile(r"([A-Za-z_-]+)=([0-9]{1,7})")
_AROUND_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_HOSTLIST_ITEM = re.compile(r"[^\[\],]*(?:\[[^\[\]]*\][^\[\],]*)?")


def parse_open_mpi(text: str, where: str = "hostfile", contract: str = "") -> tuple[Member, ...]:
    """Lines of `HOST [slots=N] [max_slots=M]`."""
    return _merged(_lines(text, _open_mpi_line, _OPEN_MPI, where, contract), where, contract)


def parse_hydra(text: str, where: str = "hostfile", contract: str = "") -> tuple[Member, ...]:
    """Lines of `HOST[:N]`, the colon taken from the right. A host's lines add up, and its ranks are neighbors."""
    summed: dict[str, Member] = {}
    for member in _lines(text, _hydra_item, _HYDRA, where, contract):
        first = summed.setdefault(member.host, member)
        if first is not member:
            slots = sum(1 if each.slots is None else each.slots for each in (first, member))
            if slots > MAX_COUNT:
                raise bad_value(where, f"{member.host} with {slots} slots", f"at most {MAX_COUNT} slots", contract)
            summed[member.host] = Member(member.host, slots)
    return tuple(summed.values())


def parse_horovod(text: str, where: str = "hosts", contract: str = "") -> tuple[Member, ...]:
    """`HOST:N,HOST:N` as horovodrun's -H takes it."""
    items = text.strip().replace(",", "\n") if text.strip() else ""
    if items and any(not item.strip() for item in items.split("\n")):
        raise bad_value(where, text, "HOST:N,HOST:N", contract)
    return _merged(_lines(items, _hydra_item, _HYDRA, where, contract), where, contract)


def parse_discovery(text: str, where: str = "discover_hosts.sh", contract: str = "") -> tuple[Member, ...]:
    """The output of a discovery script (`HOST` or `HOST:N` lines), or the script itself (`echo` lines)."""
    return _merged(_lines(text, _discovery_line, f"echo {_HYDRA}", where, contract), where, contract)


def expand_hostlist(text: str, where: str = "hostlist", contract: str = "") -> tuple[str, ...]:
    """Flux's short form: `name-[0-3,5],other`, at most MAX_HOSTS of them."""
    hosts: list[str] = []
    for line in text.splitlines():
        bare = line.partition("#")[0].strip()
        for item in _hostlist_items(bare):
            expanded = _expand(item)
            if expanded is None or len(hosts) + len(expanded) > MAX_HOSTS:
                raise bad_value(where, bare, f"host names like name-[0-3,5], at most {MAX_HOSTS}", contract)
            hosts += expanded
    if len(set(hosts)) != len(hosts):
        raise bad_value(where, text, "each host once", contract)
    return tuple(hosts)


def render_open_mpi(members: Iterable[Member]) -> str:
    """An Open MPI hostfile."""
    return "".join(f"{_open_mpi_text(member)}\n" for member in members)


def render_hydra(members: Iterable[Member]) -> str:
    """A host file for MPICH's and Intel's Hydra."""
    return "".join(f"{_hydra_text(member)}\n" for member in members)


def render_horovod(members: Iterable[Member]) -> str:
    """The value of horovodrun's -H."""
    return ",".join(map(_hydra_text, members))


def _lines(
    text: str, parse: Callable[[str], Member | None], expected: str, where: str, contract: str
) -> list[Member]:
    members: list[Member] = []
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.partition("#")[0].strip()
        if not bare:
            continue
        member = parse(bare)
        if member is None:
            raise bad_value(f"{named(where, 120)} line {number}", bare, expected, contract)
        members.append(member)
        if len(members) > MAX_HOSTS:
            raise bad_value(where, f"{len(members)} lines", f"at most {MAX_HOSTS} hosts", contract)
    return members


def _open_mpi_line(line: str) -> Member | None:
    host, *words = _AROUND_EQUALS.sub("=", line).split()
    counts: dict[str, int] = {}
    for word in words:
        match = _WORD.fullmatch(word)
        name = match[1].replace("-", "_") if match else ""
        if match is None or name not in ("slots", "max_slots") or name in counts:
            return None
        counts[name] = int(match[2])
    slots, most = counts.get("slots"), counts.get("max_slots")
    if parse_host(host) is None or (most is not None and most < (slots or 0)):
        return None
    return Member(host, slots, most)


def _hydra_item(item: str) -> Member | None:
    host, colon, count = item.rpartition(":")
    if not colon:
        return Member(item) if parse_host(item) else None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    slots = parse_number(count, 0, MAX_COUNT)
    return Member(host, slots) if slots is not None and parse_host(host) and not host[-1:].isspace() else None


def _discovery_line(line: str) -> Member | None:
    words = line.split()
    if words[0] == "echo":
        words = [word.strip("'\"") for word in words[1:]]
    return _hydra_item(words[0]) if len(words) == 1 else None


def _merged(members: list[Member], where: str, contract: str) -> tuple[Member, ...]:
    """Each host once: two different numbers of slots contradict, a host without any gets one more per line."""
    merged: dict[str, Member] = {}
    repeats: dict[str, int] = {}
    for member in members:
        first = merged.setdefault(member.host, member)
        if first.slots != member.slots:
            contradiction = f"{first.host} with {first.slots} and {member.slots} slots"
            raise bad_value(where, contradiction, "the same number of slots wherever a host is named", contract)
        repeats[member.host] = repeats.get(member.host, 0) + 1
    return tuple(
        Member(m.host, repeats[m.host]) if m.slots is None and repeats[m.host] > 1 else m for m in merged.values()
    )


def _hostlist_items(line: str) -> list[str]:
    """Split at the commas outside of brackets; an item that is no item stays whole and fails later."""
    items: list[str] = []
    at = 0
    while at < len(line):
        match = _HOSTLIST_ITEM.match(line, at)
        end = match.end() if match else len(line)
        if end < len(line) and line[end] != ",":
            return [*items, line[at:]]
        items.append(line[at:end].strip())
        at = end + 1
    return items


def _expand(item: str) -> list[str] | None:
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item] if parse_host(item) else None
    inside, closed, after = rest.partition("]")
    if not closed:
        return None
    ranges = inside.split(",")
    hosts: list[str] = []
    for part in ranges:
        numbers = _numbers(part.strip())
        if numbers is None or len(hosts) + len(numbers) > MAX_HOSTS:
            return None
        hosts += [f"{before}{number}{after}" for number in numbers]
    return hosts if all(parse_host(host) == host for host in hosts) else None


def _numbers(part: str) -> list[str] | None:
    match = _RANGE.fullmatch(part)
    if match is None:
        return None
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first or last - first >= MAX_HOSTS:
        return None
    width = len(match[1])  # node[08-10] keeps its zeros
    return [str(number).zfill(width) for number in range(first, last + 1)]


def _open_mpi_text(member: Member) -> str:
    words = [member.host]
    if member.slots is not None:
        words.append(f"slots={member.slots}")
    if member.max_slots is not None:
        words.append(f"max_slots={member.max_slots}")
    return " ".join(words)


def _hydra_text(member: Member) -> str:
    return member.host if member.slots is None else f"{member.host}:{member.slots}"
