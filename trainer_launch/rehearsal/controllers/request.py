"""One job and what it was given with: the documents that it may refer to, and what its operator was told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer_launch.rehearsal.controllers.fields import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A job's document, the runtimes by name, and the cluster's domain where its operator writes it into names."""

    job: Field
    runtimes: Mapping[str, Field] = field(default_factory=dict)
    domain: str = ""  # such as cluster.local; "" as operators have it by default

    @property
    def dotted_domain(self) -> str:
        """The domain as the end of a name."""
        return f".{self.domain}" if self.domain else ""
