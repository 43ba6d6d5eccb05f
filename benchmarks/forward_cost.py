"""What a forward of the real target over n tokens costs, against the floor of this machine.

The floor of n tokens is the larger of (bytes of the weights) / (read bandwidth) and (FLOPs of the products) / (FLOP
rate of float32, in which all packings multiply), both rates measured in this run, each by torch's own operator and by a
packed product: the faster counts. A forward is the whole of it: embedding, layers with a cache of 256 tokens, and logits of
all n tokens; attention, norms and the cache are not in the floor. Packings and token counts take turns, so that a busy spell
of the machine hits all alike; a figure is the minimum over the turns. `noise` is the largest ratio of two such minima of one
and the same forward.

    python benchmarks/forward_cost.py [--quick] [--threads N]

The last line is one JSON object: fp32_ratio_8_to_1 (packed fp32, 8 tokens over 1), floor_gap_1/8/16 (time over floor in
`packing`, the packing with the smallest largest gap), stock_8_over_packed_8 (stock fp32 over that packing), the gaps of
every packing, and the rates.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import eyas  # noqa: F401  before torch: OpenMP reads how long threads spin when torch loads it

# isort: split
import torch
from torch import Tensor, nn

from eyas.decoding.cache import KVCache
from eyas.kernels.linear import PackedLinear
from eyas.target import Target

CONTEXT = 256  # tokens in the cache before a forward
AGAIN = "fp16 again"  # the A/A twin


class Forward:
    """The target under one packing, with a filled cache."""

    def __init__(self, weights: str) -> None:
        self.target = Target.load("smollm2", weights=weights)
        self.cache = KVCache(self.target.layer_shapes, 1, CONTEXT + 64)
        self.cache.lengths[0] = CONTEXT

    def __call__(self, count: int) -> Tensor:
        """Logits [1, count, V] of `count` tokens behind the context."""
        slots = torch.arange(CONTEXT, CONTEXT + count)[None]  # [1, n]
        mask = torch.ones(count, CONTEXT + count, dtype=torch.bool).tril(CONTEXT)[None, None]  # [1, 1, n, K]
        out = self.target.forward(slots, slots, self.cache.view(0, 1, slots), mask)
        return self.target.logits(out.hidden)

    @property
    def matrices(self) -> list[Tensor]:
        """The weights that a forward reads whole, one tensor a product."""
        packed = [m.packed for m in self.target.model.modules() if isinstance(m, PackedLinear)]
        return packed + [m.weight for m in self.target.model.modules() if isinstance(m, nn.Linear)]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Rates:
    """Read bandwidth in bytes/s, over 256 MB, and FLOPs/s of float32 products; `measure` keeps the highest seen."""

    SIDE, INNER = 8192, 1536

    def __init__(self) -> None:
        large, square = torch.ones(self.SIDE, self.SIDE), torch.randn(self.INNER, self.INNER)
        reader, row = PackedLinear(large, None, "fp32"), torch.ones(1, self.SIDE)
        multiplier = PackedLinear(square, None, "fp16")
        self._reads: list[Callable[[], object]] = [large.sum, lambda: reader(row)]
        self._products: list[Callable[[], object]] = [lambda: square @ square, lambda: multiplier(square)]
        self.bandwidth, self.flops = 0.0, 0.0

    def measure(self) -> None:
        self.bandwidth = max(self.bandwidth, *(4 * self.SIDE**2 / seconds(read) for read in self._reads))
        self.flops = max(self.flops, *(2 * self.INNER**3 / seconds(product) for product in self._products))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and token counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    counts = [1, 8, 16] if args.quick else [1, 2, 4, 8, 16, 32]
    turns = 8 if args.quick else 30

    forwards = {weights: Forward(weights) for weights in ("stock", "fp32", "fp16", "int8")}
    sizes = {name: sum(m.nbytes for m in forward.matrices) for name, forward in forwards.items()}
    products = sum(m.numel() for m in forwards["stock"].matrices)  # multiply-adds a token
    forwards[AGAIN] = forwards["fp16"]

    best = {(name, count): float("inf") for name in forwards for count in counts}
    rates = Rates()
    with torch.inference_mode():
        for _ in range(turns):
            for _ in range(2):
                rates.measure()
            for count in counts:
                for name, forward in forwards.items():
                    best[name, count] = min(best[name, count], seconds(lambda f=forward, n=count: f(n)))

    bandwidth, flops = rates.bandwidth, rates.flops

    def floor(name: str, count: int) -> float:
        return max(sizes[name] / bandwidth, 2 * products * count / flops)

    gaps = {name: {n: best[name, n] / floor(name, n) for n in counts} for name in sizes}
    packing = min(("fp32", "fp16", "int8"), key=lambda name: max(gaps[name][n] for n in (1, 8, 16)))
    load = os.getloadavg()[0]
    print(f"{args.threads} threads, load {load:.1f}, {bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s")
    print(f"{'ms (over floor)':<16}" + "".join(f"{n:>8} tokens" for n in counts))
    for name in gaps:
        row = "".join(f"{1e3 * best[name, n]:>8.1f} ({gaps[name][n]:4.2f})" for n in counts)
        print(f"{name + f' {sizes[name] / 1e6:.0f} MB':<16}{row}")
    figures = {
        "fp32_ratio_8_to_1": best["fp32", 8] / best["fp32", 1],
        **{f"floor_gap_{n}": gaps[packing][n] for n in (1, 8, 16)},
        "stock_8_over_packed_8": best["stock", 8] / best[packing, 8],
        "noise": max(max(pair) / min(pair) for pair in ((best[AGAIN, n], best["fp16", n]) for n in counts)),
        "bandwidth_gb_s": bandwidth / 1e9,
        "gflop_s": flops / 1e9,
    }
    rounded = {key: round(value, 3) for key, value in figures.items()}
    by_packing = {name: {str(n): round(gap, 3) for n, gap in row.items()} for name, row in gaps.items()}
    settings = {"packing": packing, "threads": args.threads, "load": round(load, 2), "turns": turns}
    print(json.dumps({**rounded, **settings, "gaps": by_packing}))


if __name__ == "__main__":
    main()
