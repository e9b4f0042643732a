"""Where a Trainer v2 pod may report its progress. No contract of its own: any v2 pod may carry it.

The variable called TOKEN holds a path. The token itself is never read here: it rotates and belongs in no Job.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct, to_builtins

from trainer_launch.contracts.source import Source
from trainer_launch.model import Job, Json
from trainer_launch.model.errors import ContractError
from trainer_launch.model.value_parsers import parse_host

METHOD = "POST"

_URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
_PORTS = {"https": 443, "http": 80}
_NAME = "[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
_PATH = re.compile(rf"/apis/trainer\.kubeflow\.org/[a-z0-9]{{1,32}}/namespaces/{_NAME}/trainjobs/{_NAME}/status")
_BEARER = re.compile(r"[A-Za-z0-9._~+/=-]+")


class StatusEndpoint(Struct, frozen=True, kw_only=True):
    """The status server's address, and the files that open it."""

    scheme: str
    server_host: str
    server_port: int
    path: str
    ca_file: str
    token_file: str


def read_status(source: Source) -> StatusEndpoint | None:
    """The endpoint, None when the feature is off."""
    if not source.has(_URL):
        return None
    url = source.text(_URL, "status_enabled")
    parsed = _parse_url(url)
    if parsed is None:
        expected = "http(s)://HOST[:PORT]/apis/trainer.kubeflow.org/VERSION/namespaces/NAME/trainjobs/NAME/status"
        raise source.error(_URL, url, expected)
    scheme, host, port, path = parsed
    return StatusEndpoint(
        scheme=scheme,
        server_host=host,
        server_port=port,
        path=path,
        ca_file=source.path(_CA_CERT, "ca_file"),
        token_file=source.path(_TOKEN, "token_file"),
    )


def status_details(endpoint: StatusEndpoint | None, job: Job, completion_index: int | None) -> dict[str, Json]:
    """The endpoint as details of a job. Every report replaces the whole status, so only rank 0 may send one."""
    if endpoint is None:
        return {"status_enabled": False, "should_report_progress": False}
    rank = job.node_rank if job.node_rank is not None else completion_index
    foreign = job.details.get("foreign_replicated_job") is True
    return {
        "status_enabled": True,
        "should_report_progress": rank == 0 and not foreign,
        **to_builtins(endpoint),
    }


def endpoint_of(job: Job) -> StatusEndpoint | None:
    """Where this node has to report the job's progress; None when it has not."""
    if job.details.get("should_report_progress") is not True:
        return None
    values: dict[str, Any] = {field.name: job.details[field.name] for field in fields(StatusEndpoint)}
    return StatusEndpoint(**values)


def authorization_header(token: str) -> str:
    """The header's value for the text of the token file; what could break the header is refused, unshown."""
    bare = token.strip()
    if not _BEARER.fullmatch(bare):
        raise ContractError(
            f"the file that {_TOKEN} names has no valid token ({len(token)} characters); "
            f"expected one word of letters, digits and ._~+/=-"
        )
    return f"Bearer {bare}"


def _parse_url(url: str) -> tuple[str, str, int, str] | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    host = parse_host(parts.hostname or "")
    plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in _PORTS or host is None or not _PATH.fullmatch(parts.path) or port == 0 or not plain:
        return None
    return parts.scheme, host, port or _PORTS[parts.scheme], parts.path
