"""How surely do hidden tests catch what they are meant to catch, and never the engine that is right?

    python3 scripts/hidden_rates.py --seeds 100               100 seeds: the complete engine, and every mistake
    python3 scripts/hidden_rates.py --seeds 20 double_free    one mistake (acceptance/wrong)
    python3 scripts/hidden_rates.py --seeds 30 --write        keep the table in docs/hidden.md
    python3 scripts/hidden_rates.py --every-test double_free  which hidden tests fail for it (of seed 0)

For each seed the complete engine, and for every tenth one the other right ones (acceptance/wrong/different.py), run all
hidden tests. A mistake runs the tests meant for it (MEANT below) until the first one fails: then it is caught. Seeds
are "rates/0", "rates/1", ...

Exit code 0: right engines passed everything, and every mistake was caught by at least 95 % of the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "acceptance")]

DOCUMENT = ROOT / "docs" / "hidden.md"
LEAST = 0.95
MEANT = {  # hidden tests, and the mistakes that they have to catch
    "HiddenRequests.test_answers":
        "current_token_left_out position_0_never_written one_token_too_many first_token_never_ends "
        "text_of_the_last_token_lost tokens_equal_to_everything exit_with_status_0 process_ends_with_status_0 "
        "goes_on_after_the_end",
    "HiddenRequests.test_single_tokens": "no_tokens_means_one",
    "HiddenRequests.test_fixture_on_fresh_weights": "golden_tokens_hard_coded fast_backend_forgets_the_rotation",
    "HiddenRequests.test_two_models": "output_memoised_by_prompt",
    "HiddenRequests.test_strange_tokens": "true_taken_for_1",
    "HiddenRequests.test_ids": "second_request_replaces_the_first cancel_of_an_unknown_id_ignored",
    "HiddenCache.test_operations":
        "keys_and_values_swapped reserved_positions_read_as_zeros width_not_checked handles_found_by_request_id "
        "handles_numbered_by_each_manager token_counts_rounded tokens_counted_once_a_page one_page_ahead "
        "one_page_too_many_at_full_pages double_free no_rollback counts_equal_to_everything",
    "HiddenCache.test_cached_answers":
        "hidden_recompute positions_counted_from_the_chunk dirty_page_reuse all_is_prefill backend_called_for_show",
    "HiddenCache.test_stored_numbers": "shadow_cache private_recompute store_for_show",
    "HiddenCache.test_cancels": "leak_on_cancel late_cancel_kills_the_new_request",
    "HiddenLoads.test_random_arrivals":
        "budget_ignored block_tables_mixed_up logits_handed_out_the_wrong_way_round static_batching "
        "time_to_first_token_without_the_wait sequential",
    "HiddenLoads.test_one_token_each": "no_sample_is_a_sample_of_0",
    "HiddenLoads.test_long_tails": "positions_end_at_40 peak_memory_halved",
    "HiddenLoads.test_scheduler_alone": "last_in_first_out budget_0_means_no_limit slot_lost_with_a_cancel",
    "HiddenLoads.test_rush": "shortest_first_without_aging",
    "HiddenLoads.test_turns": "the_same_ones_first",
    "HiddenLoads.test_long_prompt": "prefill_starves_decode prompts_one_after_the_other",
    "HiddenLoads.test_sampling": "one_generator_for_all",
    "HiddenLoads.test_stream": "fake_streaming cancel_sets_a_flag_only",
    "HiddenMemory.test_forks":
        "forks_are_no_hits no_copy_on_write one_user_a_page shared_slots_counted_twice",
    "HiddenMemory.test_page_sizes": "page_size_written_into_the_code",
    "HiddenMemory.test_tight_memory": "preemption_loses_a_token preempted_requests_end_with_an_error",
    "HiddenMemory.test_never_fits": "a_page_kept_back what_never_fits_waits_for_ever",
    "HiddenMemory.test_crowd": "endless_overtaking nobody_overtakes",
    "HiddenMemory.test_interrupted_samples": "random_numbers_start_again",
    "HiddenMemory.test_families": "stale_prefix_entry prefix_published_before_computed nothing_left_to_compute",
    "HiddenMemory.test_salts": "salt_ignored",
    "HiddenMemory.test_leaving": "unread_tokens_dropped close_forgets_the_pages",
    "HiddenQuantization.test_strange_groups":
        "constant_group_becomes_zero zero_point_clamped tail_of_a_row_dropped correction_stored_nowhere "
        "negative_nibbles_lose_their_sign int4_takes_a_byte_each quantized_by_label_only",
    "HiddenQuantization.test_formats":
        "float_copy_is_used one_global_scale config_not_checked metadata_not_checked half_of_the_error_reported",
    "HiddenQuantization.test_engines": "bytes_unchanged",
    "HiddenQuantization.test_pages": "int8_pages_by_name_only",
    "HiddenQuantization.test_search": "search_by_name_only",
    "HiddenService.test_faults": "one_fault_kills_its_neighbours two_terminal_events failures_dropped",
    "HiddenService.test_record": "cancels_not_recorded seeds_from_the_system patched_timer",
    "HiddenService.test_readers": "one_thread_only generate_leaves_the_rest_behind",
    "HiddenService.test_budget_in_bytes": "memory_budget_rounded_up",
    "HiddenLoads.test_techniques": "batching_setting_ignored",
}
NOT_MEANT = {  # mistakes that no hidden test looks for, and why
    "golden_output_forgotten": "concerns the parser, which is given",
    "schema_errors_without_a_place": "concerns the parser, which is given",
    "rotary_pairs_as_halves": "concerns the reference decoder, which is given; hidden tests use the harness's own",
    "floats_kept_beside": "memory is measured by the allocator in M5Quantization.test_memory_really_falls; no draw "
                          "changes what it finds",
    "driver_always_exits_with_0": "concerns the command line, which M6EndToEnd.test_driver runs; only its exit code "
                                  "counts",
    "reference_does_the_work":
        "the operations are tested themselves, on numbers drawn anew, in M1Reference.test_operations",
    "a_quarter_of_the_bytes":
        "the claim is compared with what is stored in M2KVCache.test_counters; no draw changes it",
    "small_while_it_is_watched": "memory is measured by the allocator in M5Quantization.test_memory_really_falls",
    "pages_of_max_tokens_reserved": "one small pool shows it, in M4PagedKV.test_pages_are_taken_as_they_fill",
}


def meant() -> dict[str, str]:
    """{mistake: hidden test}."""
    return {mistake: test for test, mistakes in MEANT.items() for mistake in mistakes.split()}


def ids_of(test: str) -> list[str]:
    """Ids of all draws of a hidden test; of all tests if it is "all"."""
    from hidden import listed
    return [test_id for test_id in listed() if test == "all" or test_id.rpartition("_")[0] == test]


# ----------------------------------------------------------------------------------------------- one variant


def worker(variant: str, test: str, first: int, last: int, stop: str) -> None:
    """In a process of its own: print a line of JSON a seed, [seed, {test: message} of what failed]."""
    import harness
    from hidden import digest

    from acceptance.child import run_here
    from acceptance.wrong.mistake import find
    chosen = find(variant) if variant != "complete" else None
    for seed in range(first, last):
        harness.SEED = digest(f"rates/{seed}")
        failed = {}
        for test_id, outcome in run_here(ids_of(test), chosen):
            if outcome.state == "failed":
                failed[test_id] = outcome.message
                if stop:
                    break
        print(json.dumps([seed, failed]), file=sys.__stdout__, flush=True)


def run(variant: str, test: str, seeds: int, stop: bool = True) -> dict[int, dict[str, str]]:
    """{seed: {test: message}}; a process that ends before its line was printed has failed that seed."""
    found: dict[int, dict[str, str]] = {}
    while len(found) < seeds:
        done = subprocess.run([sys.executable, __file__, "--worker", variant, test, str(len(found)), str(seeds),
                               "stop" * stop], capture_output=True, encoding="utf-8", check=False)
        for line in done.stdout.splitlines():
            seed, failed = json.loads(line)
            found[seed] = failed
        if len(found) < seeds:
            if done.returncode:
                raise RuntimeError(done.stderr)
            found[len(found)] = {test: f"happened: the process ended with status {done.returncode}"}
    return found


# ------------------------------------------------------------------------------------------------- the table


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        variant, test, first, last, stop = sys.argv[2:]
        worker(variant, test, int(first), int(last), stop)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help='mistakes, right engines, or "complete"')
    parser.add_argument("--seeds", type=int, default=10, metavar="N")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="engines at a time")
    parser.add_argument("--every-test", action="store_true", help="run all hidden tests, of seed 0 alone")
    parser.add_argument("--write", action="store_true", help="write docs/hidden.md")
    options = parser.parse_args()
    from acceptance.wrong.mistake import DIFFERENT, MISTAKES, load_all
    load_all()
    wanted = {"complete": "all", **dict.fromkeys(DIFFERENT, "all"), **{
        name: test for name, test in meant().items() if name in MISTAKES}}
    if unknown := set(options.names) - set(wanted):
        parser.error(f"there is no {min(unknown)}; docs/hidden.md lists the names")
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs are numbers from 1")
    if options.names:
        wanted = {name: wanted[name] for name in options.names}
    if options.every_test:
        for name in wanted:
            print(f"{name}: {Counter(test.rpartition('_')[0] for test in run(name, 'all', 1, stop=False)[0])}")
        return 0
    began = time.strftime("%Y-%m-%d")
    with ThreadPoolExecutor(options.jobs) as pool:
        seeds = {name: max(1, options.seeds // 10) if name in DIFFERENT else options.seeds for name in wanted}
        runs = {name: pool.submit(run, name, test, seeds[name]) for name, test in wanted.items()}
        caught = {}
        for name, each in runs.items():
            found = each.result()
            caught[name] = sum(bool(failed) for failed in found.values())
            print(f"{name:45} {wanted[name]:45} failed with {caught[name]} of {seeds[name]} seeds", flush=True)
            if name not in MISTAKES:
                for seed, failed in found.items():
                    for test, message in failed.items():
                        print(f"    seed rates/{seed}: {test}: {message}")
    problems = [name for name, number in caught.items()
                if (number < LEAST * seeds[name] if name in MISTAKES else number)]
    print(f"{len(caught)} engines; not as they should: {', '.join(problems) or 'none'}")
    if options.write:
        DOCUMENT.write_text(document(seeds, began, caught, wanted), encoding="utf-8", newline="\n")
    return int(bool(problems))


def document(seeds: Mapping[str, int], date: str, caught: Mapping[str, int], wanted: Mapping[str, str]) -> str:
    """docs/hidden.md, by mistake or right engine: how many seeds there were, and how many of them failed."""
    from acceptance.wrong.mistake import DIFFERENT
    right = ["complete", *DIFFERENT]
    rows = "\n".join(f"| `{name}` | `{wanted[name]}` | {number} of {seeds[name]} |"
                     for name, number in caught.items() if name not in right)
    rest = "\n".join(f"- `{name}`: {reason}." for name, reason in NOT_MEANT.items())
    passed = ", ".join(f"`{name}` with {seeds[name] - caught[name]} of {seeds[name]}" for name in right)
    head = HEAD.format(seeds=seeds["complete"], date=date, tests=len(ids_of("all")), passed=passed)
    return f"{head}{rows}\n{REST}{rest}\n"


HEAD = """# Hidden tests

`python3 -m acceptance hidden --seed SECRET` draws {tests} tests from a seed that only the teacher knows, and
runs them; `--help` says what else it does. The code is public, and a student may try it with any seed of their own.
Same seed, same tests, byte for byte. A seed should be long and random
(`python3 -c "import secrets; print(secrets.token_hex(16))"`): a short one can be guessed and tried.

What they are worth, measured by `python3 scripts/hidden_rates.py --seeds {seeds} --write` on {date}. Right engines (the
complete one, and those of `acceptance/wrong/different.py`) passed every hidden test with so many seeds:
{passed}.

Wrong ones (`acceptance/wrong/`), the hidden test meant for each, and with how many seeds one of its draws failed:

| mistake | hidden test | caught |
| --- | --- | ---: |
"""
REST = """
No hidden test is meant for these; the public suite catches them:

"""


if __name__ == "__main__":
    os.environ.setdefault("P07_SEED", "0")  # before harness is imported; each run sets its own
    sys.exit(main())
