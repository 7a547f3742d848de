"""Lines of docs/benchmarks.md about a training step."""

from __future__ import annotations

from typing import Any


def step_rows(result: dict[str, Any]) -> list[str]:
    """A whole training step beside Hugging Face models."""
    demanded = {
        "hybrid dense, chunked": "0.80",
        "hybrid dense, cpp": "1.05",
        "hybrid MoE, chunked": "0.85",
        "hybrid MoE, cpp": "1.05",
    }
    rows = [
        f"float32 matmul peak of the thread: {result['peak_gflops']:.1f} GFLOP/s. "
        "MFU counts the model's FLOPs only; demanded are 60 % on a slow core.",
        "",
        "| model | tokens per CPU second | of its peer | demanded | MFU |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ratio = f"{row['ratio']:.2f} of {row['peer']}" if "ratio" in row else ""
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        demand = demanded.get(row["model"], "")
        speed = row["tokens_per_cpu_second"]
        rows.append(f"| {row['model']} | {speed:.0f} | {ratio} | {demand} | {mfu} |")
    return rows


def compiled_rows(result: dict[str, Any]) -> list[str]:
    """Time of a step with compiled blocks beside one without, and of the first one."""
    rows = [
        "The hybrids of the training step above, by kernels of inductor's C++ backend, in float32 "
        "on one thread. Beside C++ passes of our own the compiler has less to gain than on a GPU.",
        "",
        "| model | ms CPU a step | compiled | times as fast | first step, seconds |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        rows.append(
            f"| {row['model']} | {row['plain']:.0f} | {row['compiled']:.0f} | {row['ratio']:.2f} | "
            f"{row['first_seconds']:.0f} |"
        )
    moved = result["moved"]
    rows += [
        "",
        f"Bytes that a block of `{moved['model']}` and its loss read and write beside their matrix "
        "products, bf16, forward and backward, a token: counted from operators on the meta device "
        "and from what inductor has scheduled for CPUs, not measured. The loss is not compiled, "
        "and GPUs take our Triton kernels where blocks are not.",
        "",
        "| part | as it is, KB | our Triton kernels, KB | compiled, KB | demanded of the least |",
        "|---|---|---|---|---|",
    ]
    demanded = {"rwkv": "900"}
    for row in moved["rows"]:
        sizes = (row[form]["kilobytes"] for form in ("eager", "our kernels", "compiled"))
        cells = " | ".join(f"{size:,.0f}" for size in sizes)
        rows.append(f"| {row['block']} | {cells} | {demanded.get(row['block'], '')} |")
    rows.append(f"| loss | {moved['loss']['kilobytes']:,.0f} |  |  | 1,200 |")
    return rows
