"""What programs print: errors and their causes, stacks, mpirun's and horovodrun's words, steps."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from tests.fuzz.oracle import FOLDER, assert_encodable, assert_sentence, attempt
from tests.fuzz.registry import target
from trainer_launch.diagnosis import stacks as of_faulthandler
from trainer_launch.host import deadline_subprocess
from trainer_launch.model import Death, Outcome, Verdict
from trainer_launch.model.errors import UsageError
from trainer_launch.model.units import printable
from trainer_launch.mpi import mpirun_command, mpirun_messages, remote_hosts, ssh_client, ssh_server
from trainer_launch.observability import progress
from trainer_launch.preflight import fault_isolation, mpi_hosts
from trainer_launch.supervisor import error_lines, failure, outcome
from trainer_launch.supervisor.output import LINE_BYTES, PipeText, Stream

_PATTERN = re.compile("loss")


@target()
def symptom(data: bytes) -> None:
    """The error that ended a program, and its cause; a text of 60 KB is understood as fast as it was written."""
    text = data.decode("utf-8", "replace")
    for shown in (text, (text * 30)[:60_000]):
        lines = tuple(shown.split("\n"))
        error = error_lines.final_error(lines)
        assert len(error) <= len(lines)
        error_lines.headline(lines)
        error_lines.last_words(lines)
        error_lines.with_cause(error_lines.essence(shown), lines)
        error_lines.recognise("\n".join(error))
        error_lines.recognise(shown)
        for line in lines[:50]:
            error_lines.error_name(line)


@target()
def stacks(data: bytes) -> None:
    """What faulthandler has written, cut anywhere."""
    text = data.decode("utf-8", "replace")
    found = of_faulthandler.main_thread(text)
    of_faulthandler.waits_for_others(found)
    assert isinstance(of_faulthandler.where(found), str)
    of_faulthandler.main_thread((text * 20)[:60_000])


@target()
def mpi_output(data: bytes) -> None:
    """Lines of mpirun, horovodrun and ssh, and versions of mpirun."""
    text = data.decode("utf-8", "replace")
    said, elastic = mpirun_messages.MpirunReport(), mpirun_messages.MpirunReport()
    for line in text.split("\n"):
        said = mpirun_messages.with_line(said, line)
        elastic = mpirun_messages.with_line_of_horovod(elastic, line, is_elastic=True)
        mpirun_messages.with_line_of_horovod(said, line, is_elastic=False)
    for one in (said, elastic):
        assert one.rank is None or one.rank >= 0
        assert len(one.words) <= 400
    found = mpirun_command.recognised((text * 20)[:60_000])
    assert found is None or str(found)
    mpi_hosts.read("T", text)
    for code in (None, 0, 1, 255):
        mpi_hosts.refusal(code, text)


@target()
def heard(data: bytes) -> None:
    """Output as it passes by: cut anywhere it is the same lines, and no line is lost."""
    whole, parts = progress.OutputScanner(), progress.OutputScanner()
    cut = data[0] % 50 + 1 if data else 1
    whole.scan(data, (_PATTERN,))
    for at in range(0, len(data), cut):
        for one in parts.scan(data[at : at + cut], (_PATTERN,)):
            assert len(one.line) <= progress.MAX_TEXT
            assert one.step is None or 0 <= one.step < 10**12
    assert len(whole.rest) <= LINE_BYTES
    source = PipeText(b"[x] ", Stream())
    written = b"".join(source.feed(data[at : at + cut]) for at in range(0, len(data), cut)) + source.flush(end=True)
    kept = written.replace(b"[x] ", b"")
    assert re.sub(rb"[\r\n]", b"", kept) == re.sub(rb"[\r\n]", b"", data.replace(b"[x] ", b"")) or b"[x] " in data
    source.last_lines(60)


@target()
def key_file(data: bytes) -> None:
    """The mounted ssh key, of which nothing is shown."""
    folder = Path(FOLDER)
    (folder / "id_rsa").write_bytes(data)
    found = attempt(ssh_client._read_key, folder / "id_rsa", kinds=(UsageError,), names="id_rsa")
    assert not isinstance(found, bytes) or found.endswith(b"\n")
    ssh_client.PUBLIC_KEY.fullmatch(data.decode("utf-8", "replace").strip())
    fault_isolation.pair(0, 1)


@target()
def ssh_said(data: bytes) -> None:
    """What ssh and sshd print of their configuration, and why a host does not let us in, as the log says it."""
    text = data.decode("utf-8", "replace")
    port = ssh_client.port_in(text)
    assert port is None or 0 < port < 65536
    with suppress(UsageError):
        ssh_server.check_capabilities(data)
    assert_sentence(str(ssh_server._refusal(text)))
    for pattern in (ssh_server._MISSING, ssh_server._UNSAFE):
        found = pattern.search(text)
        assert found is None or found[1].startswith("/")
    why = printable(deadline_subprocess.Ended(status=255, stderr=data).why())
    seen = {
        f"host-{number}": remote_hosts.Readiness(remote_hosts.HostStage(number % 5), why)
        for number in range(len(data) % 30)
    }
    assert_sentence(remote_hosts.summary(seen))


@target()
def ending(data: bytes) -> None:
    """torchrun's error file in the first line, then what the program and mpirun said: the pod's end, in bounds."""
    note, _, rest = data.partition(b"\n")
    lines = tuple(rest.decode("utf-8", "replace").split("\n"))[-60:]
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(note)
        content = error_lines.read_error_file(file.name)
    for code, number in ((1, None), (255, None), (None, 9), (None, 11)):
        death = failure.with_torchruns_file(Death(process="p", code=code, signal=number), content)
        found = failure.classify(death, failure.Evidence(last_lines=lines))
        ended = outcome.placed(Outcome(verdict=Verdict.FAILED, failure=found), 0, "host")
        assert 0 < outcome.exit_code(ended) < 256
        assert len(outcome.summary(ended).splitlines()) == 1
        assert len(outcome.termination_message(ended).encode()) <= outcome.TERMINATION_MESSAGE_BYTES
        assert outcome.termination_message(ended).startswith("reason=")
    said = elastic = mpirun_messages.MpirunReport()
    for line in lines:
        said = mpirun_messages.with_line(said, line)
        elastic = mpirun_messages.with_line_of_horovod(elastic, line, is_elastic=True)
    for one in (said, elastic):
        end = mpirun_messages.first_failure(mpirun_messages.MpirunEnd(Death(process="mpirun", code=1), one, lines))
        found = failure.classify(mpirun_messages.death_of(end, 1), failure.Evidence())
        assert 0 < found.exit_code < 256
        assert_encodable(msgspec.json.encode(found).decode())
