"""Large requests and results: bounded item by item, and no weight on the dispatcher that forwards them."""

from __future__ import annotations

import pytest

from enginepool import Code, EnginePoolWarning, Pool, SamplingParams


def test_large_results_pass_without_weight_on_the_dispatcher() -> None:
    """Two hundred megabytes of results through a process that keeps within a few dozen."""
    with Pool(engine="echo", workers=2) as pool:
        before = peak = pool.status().rss_bytes
        prompts = (f"item {index:03}{'x' * 1000}" for index in range(200))
        for index, output in pool.iter_many(prompts, SamplingParams(max_tokens=500_000), window=20):
            assert str(output.text).startswith(f"item {index:03}")
            if index % 10 == 0:
                peak = max(peak, pool.status().rss_bytes)
        assert peak - before < 100 << 20


def test_request_too_large_fails_alone_and_is_never_sent() -> None:
    with Pool(engine="echo", workers=1) as pool:
        with pytest.warns(EnginePoolWarning, match="1 of 3 items failed"):
            outputs = pool.generate_many(["small", " " * (100 << 20), "small"], SamplingParams(max_tokens=3))
        error = outputs[1].error
        assert error is not None
        assert error.code is Code.INVALID_REQUEST
        assert "more than the pool's max_frame_bytes (67108864)" in error.message
        assert pool.status().finished == 2
