"""The settings that a group created now would have, and where each came from: for `cgx doctor`.

Values that are not allowed become complaints, all of them at once. All other settings are still shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch_cgx import config, scopes

__all__ = ["DEFAULT", "NOT_VALID", "PROGRAM", "VARIABLE", "Setting", "in_force"]

DEFAULT, VARIABLE, PROGRAM, NOT_VALID = "default", "variable", "program", "not valid"

_KNOWN = sorted(set(config.VARIABLES.values()))
_LONGEST = 60  # characters of a value; paths and names of nodes may be longer
_NOTHING_SAID = {
    "cross_communicator": "MPI under mpirun, else TCP",
    "link_costs": "10gbit and 4.5 us per message",
    "node_id": "found out",
    "num_threads": "torch's, at most 4 and this rank's share of cores",
    "simd": "the best this processor has",
    "socket_interface": "GLOO_SOCKET_IFNAME's first, else the one towards the store",
    "trace_folder": "no trace is written",
}


@dataclass(frozen=True, slots=True)
class Setting:
    name: str  # of the field
    value: object  # also None if the value is not valid
    variable: str
    origin: str

    @property
    def field(self) -> str:
        """Return the name that users know."""
        return "bucket_size" if self.name == "block" else self.name

    @property
    def label(self) -> str:
        """Return the variable, and which tensors it concerns if another setting has the same."""
        return f"{self.variable} (CUDA)" if self.name.startswith("cuda_") else self.variable

    @property
    def text(self) -> str:
        """Return the value in the form of its variable."""
        if self.origin == NOT_VALID:
            return "-"
        if self.value is None:
            return _NOTHING_SAID[self.name]
        if isinstance(self.value, int):  # or bool
            return str(self.value >> 20 if self.name == "fusion_nbytes" else int(self.value))
        text = str(self.value)
        text = text if text.isprintable() else ascii(text)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def in_force(environ: Mapping[str, str] | None = None) -> tuple[list[Setting], list[str]]:
    """Return every setting, and the complaints about the variables (by default those of this process)."""
    environ = os.environ if environ is None else environ
    given = {name: environ[name] for name in _KNOWN if environ.get(name, "").strip()}
    complaints = {name: complaint for name, value in given.items() if (complaint := _complaint(name, value))}
    valid = {name: value for name, value in given.items() if name not in complaints}
    try:
        compression = config.compression_from_environ(valid)
    except ValueError as error:  # each is valid alone, but not together
        together = (config.BITS_VARIABLE, config.BLOCK_VARIABLE, config.QUANTIZER_VARIABLE)
        complaints |= {name: str(error) for name in together if name in valid}
        compression = config.EXACT
    values = asdict(compression) | asdict(config.Settings.from_environ(valid))
    program = {name: value for name, value in asdict(scopes.asked()).items() if value is not None}
    settings = []
    for name, variable in config.VARIABLES.items():
        origin = NOT_VALID if variable in complaints else VARIABLE if variable in valid else DEFAULT
        if name in program:
            settings.append(Setting(name, program[name], variable, PROGRAM))
        else:
            settings.append(Setting(name, None if origin == NOT_VALID else values[name], variable, origin))
    return settings, list(dict.fromkeys(complaints.values()))


def _complaint(name: str, value: str) -> str:
    """Return the error in the value of this one variable, or ""."""
    from torch_cgx.kernels import native

    try:
        config.compression_from_environ({name: value})
        simd = config.Settings.from_environ({name: value}).simd
        if simd is not None and native.available():
            native.simd_level(simd)  # raises for a level that this processor does not have
    except ValueError as error:
        return str(error)
    return ""
