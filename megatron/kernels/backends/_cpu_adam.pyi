"""The compiled module of cpu_adam.cpp, which is there when a compiler was at installation."""

def runs_here() -> bool: ...
def step(
    grad_format: str,
    out_format: str,
    grad: int,
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    out: int,
    size: int,
    threads: int,
    divisor: float,
    decay: float,
    weight: float,
    beta2: float,
    weight_sq: float,
    correction: float,
    eps: float,
    rate: float,
    /,
) -> None: ...
