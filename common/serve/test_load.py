"""A thousand streams, ten thousand requests, readers that hardly read, and a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from common.llm import LLM, SamplingParams
from common.requests.gc_utils import freeze_gc_heap
from common.serve.__main__ import main as command
from common.serve.conftest import SMALL, Running, posted, running, wait_for
from tiered_cache import KVTierConfig

NUM_STREAMS = 1000
FLAT_BYTES = 32 << 20  # between two rounds of the same work, the first of which has warmed it up
MAX_LAG_S = 0.05  # of 999 turns of the loop in 1,000; the longest ever may take ten times that


def rss() -> int:
    return psutil.Process().memory_info().rss


def text_of(answer: bytes) -> str:
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(c["text"] for e in events for c in json.loads(e)["choices"])


async def measure_lag(lags: list[float]) -> None:
    """How much later than asked for the loop comes back."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(0.005)
        lags.append(time.perf_counter() - begin - 0.005)


async def ask_all(port: int, prompts: list[str], seed: int) -> dict[int, str]:
    """The texts of those that stay; every second one leaves at a random moment."""
    rng = random.Random(seed)
    leaves_after = [rng.random() * 4 if i % 2 else None for i in range(len(prompts))]

    async def request_chat(i: int) -> str | None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        fields = {"prompt": prompts[i], "max_tokens": 24, "temperature": 0, "stream": True}
        writer.write(posted(fields | {"ignore_eos": True}))
        found = b""

        async def read() -> None:
            nonlocal found
            while not found.endswith(b"0\r\n\r\n"):
                data = await reader.read(1 << 16)
                assert data, "it ended before its end"
                found += data

        try:
            await asyncio.wait_for(read(), leaves_after[i])
        except asyncio.TimeoutError:
            return None
        finally:
            writer.transport.abort()
        assert b"data: [DONE]" in found
        return text_of(found)

    texts = await asyncio.gather(*map(request_chat, range(len(prompts))))
    return {i: text for i, text in enumerate(texts) if text is not None}


def wait_until_idle(server: Running, seconds: float = 60) -> None:
    wait_for(server.is_idle, seconds)
    assert server.llm.num_unfinished == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_streams_of_which_half_vanish() -> None:
    """The client has a process of its own: its work would hold this one's lock."""
    settings = {"num_blocks": 1200, "max_num_seqs": 256}  # the first round writes to all of them
    prompts = [f"def f{i % 97}(x{i}):\n    return" for i in range(NUM_STREAMS)]
    alone = LLM(**(SMALL | settings))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = alone.generate(prompts, params, use_tqdm=False)
    expected = [output.outputs[0].text for output in outputs]
    alone.close()
    freeze_gc_heap()
    with running(**settings) as server:
        lags, memory = list[float](), list[int]()
        task = asyncio.run_coroutine_threadsafe(measure_lag(lags), server.loop)
        for number in range(3):
            client = f"import sys; from common.serve.test_load import main; main({number})"
            result = subprocess.run(
                [sys.executable, "-c", client],
                input=json.dumps([server.port, prompts]),
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert result.returncode == 0, result.stderr[-2000:]
            texts = {int(i): text for i, text in json.loads(result.stdout).items()}
            assert len(texts) >= NUM_STREAMS // 2
            assert all(text == expected[i] for i, text in texts.items())
            wait_until_idle(server)
            memory.append(rss())
        task.cancel()
    lags.sort()
    found = {"lag_max_s": lags[-1], "lag_p999_s": lags[-len(lags) // 1000 - 1], "rss": memory}
    print(found, "load", os.getloadavg())
    assert memory[2] - memory[1] < FLAT_BYTES, memory
    assert found["lag_p999_s"] < MAX_LAG_S and lags[-1] < 10 * MAX_LAG_S, found


def main(seed: int) -> None:
    """The client of the test above."""
    port, prompts = json.load(sys.stdin)
    print(json.dumps(asyncio.run(ask_all(port, prompts, seed))))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_requests_and_memory_is_flat() -> None:
    with running() as server:
        memory = []
        for _ in range(4):
            with closing(server.http()) as connection:
                for i in range(2500):
                    sent = {"prompt": [i % 300 + 10, 20], "max_tokens": 1, "stream": bool(i % 2)}
                    found = server.request("POST", "/v1/completions", sent, over=connection)
                    assert found[0] == 200 and len(found[2]) > 50
            memory.append(rss())
        wait_until_idle(server)
        print(memory)
        assert memory[3] - memory[1] < FLAT_BYTES, memory


@pytest.mark.slow
def test_a_reader_of_one_byte_a_second() -> None:
    long = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 5}
    with running() as server, server.connect(posted(long), receive_buffer=4096) as slow:
        end = time.monotonic() + 20
        num_answers = 0
        while time.monotonic() < end:
            assert slow.recv(1)
            second = time.monotonic() + 1
            while time.monotonic() < second:
                fields = {"prompt": "y", "max_tokens": 3, "ignore_eos": True}
                status, answer = server.post("/v1/completions", fields)
                assert status == 200 and answer["usage"]["completion_tokens"] == 3
                num_answers += 1
        assert num_answers > 20
        slow.close()
        wait_until_idle(server)


def test_a_full_disk_is_said_at_the_start_and_never_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """All of a tier's file is reserved: a page that has no place would end the process."""
    path, tiers = tmp_path / "kv", {"host_blocks": 2, "disk_blocks": 30}
    prompts = [f"# {i}\n" + "def f(x):\n    return x\n" * 6 for i in range(6)] * 2
    with running(num_blocks=20, kv_tiers=KVTierConfig(**tiers, disk_path=path)) as server:
        kept = path.stat()
        assert kept.st_blocks * 512 >= kept.st_size > 0
        first, second = [], []
        for i, prompt in enumerate(prompts):
            fields = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
            answer = server.post("/v1/completions", fields)[1]
            (first if i < 6 else second).append(answer["choices"][0]["text"])
        assert first == second and server.is_idle()
    path.unlink()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    flag = json.dumps({**tiers, "disk_path": str(path)})
    assert command(["--port", "0", "--num-blocks", "20", "--kv-tiers", flag]) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
