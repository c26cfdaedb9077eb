"""The benchmarks by name; each is a module with `measure(setting)`, which gives its records.

A benchmark yields no record before what it compares was found to be right, and raises `Refused`
otherwise. A record that times a step has its spread `ours_s` and its shares of the peaks,
`roofline`; what is beside it is `theirs_s`, and `ratio` is the median over interleaved pairs.
"""

from types import ModuleType

from profiles.benchmarks import (
    batches,
    bounds,
    compiled,
    dcp,
    decode,
    fp8,
    fusion,
    lengths,
    mtp,
    peers,
    ranges,
    serving,
    speculation,
    tools,
)

README: dict[str, ModuleType] = {  # the numbers of the README
    "decode": decode,
    "bounds": bounds,
    "serving": serving,
    "speculation": speculation,
    "mtp": mtp,
}
BENCHMARKS: dict[str, ModuleType] = README | {
    "batches": batches,
    "lengths": lengths,
    "dcp": dcp,
    "peers": peers,
    "compiled": compiled,
    "fp8": fp8,
    "fusion": fusion,
    "ranges": ranges,
    "tools": tools,
}
