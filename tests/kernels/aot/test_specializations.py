"""Requests of all kinds, in any numbers, need no kernel that the warm-up has not compiled."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def compilations():
    import specializations  # takes Triton's driver from the process

    return specializations.compilations(90)


def test_the_warm_up_compiles_all_kernels_of_sampling():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as worker:
        at_first, later = worker.submit(compilations).result()
    assert {"_filter_thresholds", "_ban_endings", "_staged_write"} <= set(at_first)
    assert later == []
