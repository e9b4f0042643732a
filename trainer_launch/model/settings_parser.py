"""Parses options by pydantic-settings; loaded only where one is given that is not spelled plainly, or wrong."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from pydantic import Field, ValidationError, create_model

from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import PREFIX, Settings, flag_of, told, variable_of


@contextlib.contextmanager
def loaded_later(name: str) -> Iterator[None]:
    """What imports this module meanwhile gets one that loads it at the first use; others get the module itself.

    `importlib.util.LazyLoader` does not serve: the next `import` of such a module loads it.
    """
    if name in sys.modules:
        yield
        return
    module = sys.modules[name] = _Later(name)
    try:
        yield
    finally:
        module.step_aside()


class _Later(ModuleType):
    """Stands for a module that is not loaded yet."""

    def step_aside(self) -> None:
        """Let the next import find the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        self.step_aside()
        return getattr(importlib.import_module(self.__name__), name)


with loaded_later("asyncio"):  # for its command lines only; with ssl that is a seventh of what PID 1 imports
    from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict


class _Variables(EnvSettingsSource):
    """The environment without links to Services; that to trainer-launch-metrics is called as --metrics-port is."""

    def __call__(self) -> dict[str, Any]:
        """Read the variables."""
        return told({name: value or "" for name, value in self.env_vars.items()})


class _Given(BaseSettings):
    """What flags say, and over variables."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", env_ignore_empty=True, case_sensitive=False, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags over variables; pydantic's own hook."""
        return sources["init_settings"], _Variables(cls)


class _OfAnother(_Given):
    """Of another pod, whose variables are told: those of this process do not count."""

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but what is given."""
        return (sources["init_settings"],)


def parsed(flags: Mapping[str, Any], env: Mapping[str, str] | None) -> dict[str, Any]:
    """The values of flags and of TRAINER_LAUNCH_* (of another pod: its `env`), without defaults.

    Raises:
        UsageError: a value does not fit; the sentence names the flag or variable.
    """
    fields: dict[str, Any] = {
        name: (option.annotation, Field(option.default, gt=option.gt, ge=option.ge, le=option.le))
        for name, option in Settings.model_fields.items()
    }
    base, given = (_Given, flags) if env is None else (_OfAnother, {**told(env), **flags})
    try:
        found = create_model("Settings", __base__=base, **fields)(**given)
    except ValidationError as problem:
        first = problem.errors()[0]
        name = str(first["loc"][0]).lower()
        where = flag_of(name) if name in flags else variable_of(name)
        raise UsageError(
            f"invalid value {str(first['input'])[:60]!r} for {where}: {_expected(first['msg'])}"
        ) from None
    return found.model_dump(exclude_unset=True)


def _expected(message: str) -> str:
    """Pydantic's message as the second half of our sentence."""
    rest = re.sub(r"^Input should be |\bvalid |, unable to parse .*$", "", message)
    return f"expected {rest}" if rest != message else message[0].lower() + message[1:]
