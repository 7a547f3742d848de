"""`make faults`: every fault that a run is made to survive, and whether it does, in one table.

The faults are those of the tests named here; this runs them and prints a line for each.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

SUPERVISION = "tests/distributed/test_supervision.py::test_all_ranks_end_within_the_deadline"
LAUNCH = "tests/cluster/test_launch.py::test_"
RESUME = "tests/distributed/test_resume.py::test_"
STORE = "tests/distributed/test_store_faults.py::test_"
BEHIND = "tests/distributed/test_background_saves.py::test_a_"
DAMAGE = "tests/unit/checkpoint/test_store.py::test_"
HEALTH = "tests/distributed/test_health.py::test_"
HOSTS = "tests/cluster/test_hosts.py::test_"
MEMORY = "tests/distributed/test_out_of_memory.py::test_"
SLURM = "tests/cluster/test_slurm.py::test_"
PASSING = "tests/cluster/test_passing_faults.py::test_"
LOCK = "tests/unit/engines/test_run_directory.py::test_the_lock_of_a_dead_client"
STATE = "tests/distributed/test_run_state.py::test_"
DURABLE = "tests/unit/checkpoint/test_durability.py::test_"
HEAD = "tests/distributed/test_head.py::test_"
WATCHDOG = "tests/distributed/test_supervision.py::test_"
SIGNALS = "tests/unit/cluster/test_launch_signals.py::test_a_signal"
INPUT = "tests/distributed/test_bad_input.py::test_"
HUGGING_FACE = "tests/distributed/test_hugging_face.py::test_"
BASE_WEIGHTS = "tests/distributed/test_base_weights.py::test_"
BASE_RUN = "tests/distributed/test_base_run.py::test_"
LORA = "tests/distributed/test_lora_run.py::test_"
CONTINUED = "tests/distributed/test_continuing.py::test_"
TIERS = "tests/distributed/test_tiers.py::test_"
NEAREST = f"{TIERS}a_killed_run_goes_on_from_the_nearest"
IN_TIER = f"{TIERS}a_kill_in_a_save_to_a_tier"
ARCHIVE = "tests/unit/checkpoint/test_archive.py::test_"
HOST_TIERS = "tests/unit/checkpoint/test_host_tiers.py::test_"
REMOTE = "tests/unit/data/test_remote.py::test_"

# (fault, beginning of the ids of the tests that cause it, text that the ids must hold)
FAULTS = (
    ("kill -9 of a rank", f"{LAUNCH}a_lost_run_goes_on", ""),
    ("kill -9 of a rank: all end", SUPERVISION, "[die"),
    ("kill -9 of a host's processes", SUPERVISION, "[lose_the_host"),
    ("a host without power, back again", f"{HOSTS}a_host_that_loses_power", ""),
    ("kill -9 of a watchdog", SUPERVISION, "[lose_the_watchdog"),
    ("kill -9 of cdrmix launch", f"{LAUNCH}ranks_save_and_end", ""),
    ("kill -9 and TERM of the launchers", "tests/integration/test_train.py::test_ranks_that", ""),
    ("SIGSTOP of a rank", SUPERVISION, "[stop"),
    ("a rank that hangs", SUPERVISION, "[stand_still"),
    ("link down, host left out", f"{HOSTS}a_run_that_loses", ""),
    ("clock jumps forth and back", f"{LAUNCH}a_clock_that_jumps", ""),
    ("lost too often", f"{LAUNCH}a_run_that_is_lost_too_often", ""),
    ("two jobs on one run directory", f"{LAUNCH}two_jobs", ""),
    ("TERM and USR1 between steps", f"{RESUME}a_signal_saves_and_stops", ""),
    ("SIGHUP between steps", f"{RESUME}a_signal_saves_and_stops", "[HUP"),
    ("SIGHUP of cdrmix launch", f"{SIGNALS}_asks_the_ranks_to_stop", "[SIGHUP"),
    ("TERM during a save", f"{RESUME}a_signal_in_the_middle", ""),
    ("kill during a save", f"{RESUME}a_killed_run_resumes", "KILL while"),
    ("kill before the rename", f"{RESUME}a_killed_run_resumes", "before the rename"),
    ("kill after the rename", f"{RESUME}a_killed_run_resumes", "after the rename"),
    ("kill during a background write", f"{BEHIND}kill_while_a_checkpoint", ""),
    ("TERM during a background write", f"{BEHIND}signal_while_a_checkpoint", ""),
    ("write that fails for a while", f"{BEHIND}write_that_fails_at_first", ""),
    ("write that goes on failing", f"{BEHIND}write_that_goes_on_failing", ""),
    ("damaged checkpoint with a replica", f"{BEHIND}run_goes_on_from_the_copy", ""),
    ("kill at every durable operation", f"{STORE}a_kill_before_or_after", ""),
    ("kills at random times", f"{STORE}kills_at_random_times", ""),
    ("disk full in a save", f"{STORE}a_full_disk", ""),
    ("disk full in a run", f"{INPUT}a_disk_that_fills_up", ""),
    ("truncated, altered or missing file", f"{DAMAGE}a_damaged_checkpoint", ""),
    ("truncated shard in a run", f"{RESUME}a_damaged_checkpoint", "[_truncate"),
    ("altered byte in a run", f"{RESUME}a_damaged_checkpoint", "[_alter"),
    ("corrupt latest in a run", f"{RESUME}a_damaged_checkpoint", "[_corrupt_latest"),
    ("corrupt or missing latest", f"{DAMAGE}what_verifies_counts", ""),
    ("ESTALE on one rank at start", f"{STATE}a_file_system_that_fails_one_rank", "[digest"),
    ("EIO on one rank in a save", f"{STATE}a_file_system_that_fails_one_rank", "[write_share"),
    ("two failures in one save", f"{DURABLE}two_failures_in_one_save", ""),
    ("checkpoint volume not mounted", f"{STATE}a_checkpoint_volume_that_is_not", ""),
    ("hosts with different data sets", f"{STATE}hosts_with_different_data_sets", ""),
    ("a replica that missed a save", f"{DURABLE}a_copy_that_missed_a_save", ""),
    ("every checkpoint damaged", f"{RESUME}state_that_is_damaged_throughout", ""),
    ("unreadable data shard", f"{INPUT}a_shard_that_disappears", ""),
    ("non-finite loss", "tests/distributed/test_loop.py::test_a_diverged_run", ""),
    ("non-finite gradient: skipped", f"{HEALTH}a_step_with_a_spoilt_gradient", ""),
    ("non-finite gradient: a run goes on", f"{HEALTH}a_skipped_step_takes", ""),
    ("non-finite gradient: rollback", f"{HEALTH}a_run_that_went_back", "[non_finite"),
    ("loss spike: rollback", f"{HEALTH}a_run_that_went_back", "[loss_spike"),
    ("out of memory: goes on in smaller parts", f"{LAUNCH}a_run_short_of_memory", ""),
    ("out of memory: the same losses", f"{MEMORY}one_rank_short_of_memory", ""),
    ("out of memory with one sample", f"{MEMORY}one_sample_that", ""),
    ("loss that stays high", f"{HEALTH}a_run_that_does_not_recover", ""),
    ("scontrol requeue, preemption", f"{SLURM}a_requeued_and_preempted", ""),
    ("requeue in Stage A and in Stage B", f"{SLURM}a_reasoning_run_goes_on", ""),
    ("port taken", f"{PASSING}a_port_that_was_taken", ""),
    ("object store away", f"{PASSING}a_store_that_is_away", ""),
    ("lock of a dead client", LOCK, ""),
    ("time limit, srun and deepspeed", f"{SLURM}a_time_limit", ""),
    ("hostile packets at the head's port", f"{HEAD}strangers_are_hung_up", ""),
    ("reports of a false watchdog", f"{HEAD}a_report_of_wrong_types", ""),
    ("orders of a false head", f"{WATCHDOG}an_order_that_is_not_the_heads", ""),
    ("file server silent for two deadlines", f"{HEAD}a_silent_file_server", ""),
    ("file server silent while rank 0 logs", f"{WATCHDOG}a_silent_file_server", ""),
    ("Hugging Face: stopped and resumed", f"{HUGGING_FACE}resumed_run", ""),
    ("Hugging Face: kill during a save", f"{HUGGING_FACE}run_killed_in_the_middle", ""),
    ("Hugging Face: weights differ by host", f"{BASE_WEIGHTS}hosts_with_different", ""),
    ("Hugging Face: base gone when resumed", f"{BASE_RUN}run_goes_on_without_its_base", ""),
    ("Hugging Face: another base", f"{BASE_RUN}run_does_not_go_on", ""),
    ("Hugging Face: tied weights that differ", f"{BASE_WEIGHTS}tied_head", ""),
    ("LoRA: another base", f"{LORA}another_base", ""),
    ("LoRA: base moved", f"{LORA}the_run_goes_on_where_its_base", ""),
    ("LoRA: tensors of an adapter lost", f"{LORA}an_adapter_without", ""),
    ("continued: stopped and resumed", f"{CONTINUED}a_run_that_was_stopped", ""),
    ("continued: forgets too much", f"{CONTINUED}a_run_that_forgets", ""),
    ("tiers: kill, back on the host", NEAREST, "[nothing"),
    ("tiers: memory lost", NEAREST, "[lose_memory"),
    ("tiers: host lost", NEAREST, "[lose_the_host"),
    ("tiers: memory altered", NEAREST, "[alter_memory"),
    ("tiers: memory's manifest truncated", NEAREST, "[truncate_manifest"),
    ("tiers: memory of somebody else", NEAREST, "[memory_of_somebody_else"),
    ("tiers: memory older than shared", NEAREST, "[outdate_memory"),
    ("tiers: all lost but the archive", NEAREST, "[lose_all_but"),
    ("tiers: all damaged but the archive", NEAREST, "[damage_all_but"),
    ("tiers: kill in an upload", NEAREST, "[half_archived"),
    ("tiers: kill before a save to memory", IN_TIER, "[memory-prepare"),
    ("tiers: kill while memory is written", IN_TIER, "[memory-write_account"),
    ("tiers: kill before memory is named", IN_TIER, "[memory-publish"),
    ("tiers: kill before a save to the disk", IN_TIER, "[local-prepare"),
    ("tiers: kill while the disk is written", IN_TIER, "[local-write_account"),
    ("tiers: kill before the disk's is named", IN_TIER, "[local-publish"),
    ("archive: kill in an upload", f"{TIERS}a_kill_in_an_upload", ""),
    ("tiers: memory and disk not writable", f"{TIERS}a_tier_that_cannot_be_written", ""),
    ("tiers: parts on hosts, a host lost", f"{TIERS}parts_on_hosts", ""),
    ("tiers: memory without room", f"{HOST_TIERS}a_memory_without_room", ""),
    ("archive: not writable, at the start", f"{TIERS}an_archive_that_cannot", ""),
    ("archive: store fails in an upload", f"{ARCHIVE}an_upload_that_ends", ""),
    ("archive: store silent in an upload", f"{ARCHIVE}a_store_that_stops", ""),
    ("archive: silent at the end of a run", f"{ARCHIVE}the_end_of_a_run", ""),
    ("archive: damaged", f"{ARCHIVE}a_damaged_archive", ""),
    ("data: damaged copy of a shard", f"{REMOTE}a_copy_damaged", ""),
    ("data: store away at the start", f"{REMOTE}a_start_that_does_not_reach", ""),
    ("file server silent at the end of a run", f"{HEAD}a_log_that_cannot_be_written", ""),
)


@dataclass
class Matrix:
    """Results of the tests, by fault; a plugin of pytest's."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    outcomes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    reasons: dict[str, str] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of the table."""
        items[:] = [item for item in items if _faults_of(item.nodeid)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test, its set-up or its end went."""
        for fault in _faults_of(report.nodeid):
            self.seconds[fault] += report.duration
            if report.when == "call" or report.outcome != "passed":
                self.outcomes[fault].add(report.outcome)
            if report.skipped and isinstance(report.longrepr, tuple):
                self.reasons[fault] = str(report.longrepr[2]).removeprefix("Skipped: ")

    def line(self, fault: str) -> str:
        """One line of the table."""
        outcomes = self.outcomes[fault]
        if "failed" in outcomes:
            verdict = "FAILED"
        elif "passed" in outcomes:
            verdict = "survived"
        else:
            verdict = "skipped" if outcomes else "NO TEST"
        note = self.reasons.get(fault, f"{self.seconds[fault]:.0f} s")
        return f"{verdict:9} {fault:36} {note}"


def _faults_of(test: str) -> list[str]:
    return [
        fault for fault, beginning, text in FAULTS if test.startswith(beginning) and text in test
    ]


def main(arguments: Sequence[str]) -> int:
    """Run the tests of all faults; 0 when none failed and each has a test."""
    files = sorted({beginning.partition("::")[0] for _, beginning, _ in FAULTS})
    matrix = Matrix()
    code = pytest.main(["-q", "--no-header", *arguments, *files], plugins=[matrix])
    lines = [matrix.line(fault) for fault, _, _ in FAULTS]
    print("\n".join(["", "fault matrix", *lines]))
    return code or any(line.startswith("NO TEST") for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
