"""The compiled sums over pairs of arrays. Addresses are integers."""

def measure(type: int, a: int, b: int, count: int, floor: float, ulps: bool, out: int, /) -> None: ...
def measure_files(
    type_a: int,
    file_a: int,
    offset_a: int,
    type_b: int,
    file_b: int,
    offset_b: int,
    count: int,
    small: float,
    ulp_range: float,
    out: int,
    /,
) -> int: ...
def count_denormals(address: int, width: int, count: int, smallest: int, /) -> int: ...
