"""The reading of GPU traces that the capture benchmark makes: overlapping kernels count once, gaps
are what none covers.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu_profile


def event(name: str, begin: float, dur: float, cat: str = "kernel") -> dict:
    return {"name": name, "cat": cat, "ts": begin, "dur": dur, "ph": "X"}


def test_overlapping_kernels_count_once_and_the_rest_is_gap() -> None:
    trace = {
        "traceEvents": [
            event("a", 0, 1000),
            event("b", 500, 1000),
            event("a", 3000, 1000),
            {"name": "cpu", "cat": "cpu_op", "ts": 0},
        ]
    }
    found = gpu_profile.figures(gpu_profile.gpu_events(trace))
    assert found == {"span": 4.0, "kernels": 2.5, "gaps": 1.5, "to_host": 0.0}


def test_copies_to_the_host_are_no_kernels() -> None:
    trace = {
        "traceEvents": [
            event("a", 0, 1000),
            event("Memcpy DtoH (Device -> Pinned)", 200, 4000, "gpu_memcpy"),
        ]
    }
    found = gpu_profile.figures(gpu_profile.gpu_events(trace))
    assert found == {"span": 1.0, "kernels": 1.0, "gaps": 0.0, "to_host": 4.0}


def test_the_table_names_what_only_capture_runs() -> None:
    plain = gpu_profile.gpu_events({"traceEvents": [event("gemm", 0, 1000)]})
    capture = gpu_profile.gpu_events(
        {"traceEvents": [event("gemm", 0, 1100), event("stack", 1100, 50)]}
    )
    lines = gpu_profile.table(plain, capture).splitlines()
    assert "| median of 1, 1: gemm | 1.0000 | 1.1000 |" in lines
    assert "| sum of 1, with capture alone: stack | 0 | 0.05 |" in lines


def test_gaps_are_named_by_the_kernels_around_them() -> None:
    kernels = gpu_profile.gpu_events(
        {
            "traceEvents": [
                event("a", 0, 1000),
                event("b", 200, 100),
                event("c", 1500, 100),
                event("a", 1600, 1),
            ]
        }
    )
    assert dict(gpu_profile.gaps(kernels)) == {"a -> c": [500.0]}
