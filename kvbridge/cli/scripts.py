"""What the scripts of `scripts/` share with the command line: its settings, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbridge.cli.jobs import one_line
from kvbridge.errors import KVBridgeError, UsageError


def run_script(main: Callable[[], object]) -> None:
    """Run a script; an error that its user can act on ends it with one sentence on stderr and exit code 2."""
    try:
        main()
    except BrokenPipeError:
        raise
    except (KVBridgeError, OmegaConfBaseException, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def residual_settings(given: Sequence[str]) -> Any:
    """The settings of a residual branch, a `ResidualConfig`, from texts `name=value`.

    Raises:
        UsageError: there is no setting of that name, or its value is out of range.
        OmegaConfBaseException: a value is of another type.
    """
    from kvbridge.mappers.residual_config import ResidualConfig

    named = OmegaConf.from_dotlist(list(given))
    known = [field.name for field in fields(ResidualConfig)]
    for name in named:
        if name not in known:
            raise UsageError(f"{name}: mapper.residual has no such setting; expected one of {', '.join(known)}.")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ResidualConfig), named))
