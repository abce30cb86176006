"""What an AsyncPool's callers see of deaths: PoolLost for a dispatcher's, nothing for a worker's."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from aio_help import ENDLESS, FIVE, LOOPS, echo, run_on, until_in_hand
from conftest import tree_of, wait_for_end

from enginepool import AsyncPool, Output, PoolLost, SamplingParams


@pytest.mark.parametrize("loop_kind", LOOPS)
def test_killed_dispatcher_is_pool_lost_for_all_who_wait(loop_kind: str, fresh_run_dir: Path) -> None:
    async def main() -> None:
        async with echo(max_num_seqs=64) as pool:
            tree = tree_of((await pool.status()).pid)
            stream = pool.stream("item", ENDLESS)
            await anext(stream)
            many = asyncio.ensure_future(pool.generate_many(["item"] * 4, [FIVE, ENDLESS, FIVE, ENDLESS]))
            waits = [
                asyncio.ensure_future(pool.generate("item", ENDLESS)),
                asyncio.ensure_future(anext(pool.iter_many(["item"] * 3, ENDLESS))),
                asyncio.ensure_future(_last(stream)),
                pool.submit("item", ENDLESS),
            ]
            await until_in_hand(pool, 8)
            os.kill(tree[0], signal.SIGKILL)
            ended = await asyncio.gather(*waits, return_exceptions=True)
            assert [type(one) for one in ended] == [PoolLost] * 4
            with pytest.raises(PoolLost, match="2 of 4") as lost:
                await many
            assert [output.index for output in lost.value.outputs if isinstance(output, Output)] == [0, 2]
            for ask in (pool.generate("item"), pool.status(), pool.generate_many(["item"])):
                with pytest.raises(PoolLost):
                    await ask
            wait_for_end(tree)

    run_on(loop_kind, main())
    for left in fresh_run_dir.iterdir():
        left.unlink()


async def _last(things: Any) -> Any:
    last = None
    async for thing in things:
        last = thing
    return last


def test_killed_worker_is_not_noticed(fresh_run_dir: Path) -> None:
    async def main() -> None:
        async with AsyncPool(engine="echo", workers=2, step_s=0.001) as pool:
            many = asyncio.ensure_future(pool.generate_many(["item"] * 40, SamplingParams(max_tokens=200)))
            await until_in_hand(pool, 40)
            worker = (await pool.status()).workers[0].pid
            assert worker is not None
            os.kill(worker, signal.SIGKILL)
            assert all(output.ok for output in await many)

    asyncio.run(main())
