"""The table of a plan: what each phase takes, which devices hold it, and what takes less memory.

Invariant: the columns are the terms, in their order; every term has its advice.
"""

from collections.abc import Mapping

from features.memory_plan.terms import GIB, MemoryTerms, Phase

# The change that helps where a term takes most of the memory that is missing.
ADVICE = {
    "weights": (
        "more ranks (trainer.n_gpus_per_node), fsdp_config.param_offload=true (on CUDA), "
        "actor_rollout_ref.model.lora_rank; an engine's weights fall with "
        "actor_rollout_ref.rollout.tensor_model_parallel_size"
    ),
    "gradients": "more ranks (trainer.n_gpus_per_node), or actor_rollout_ref.model.lora_rank",
    "optimiser": (
        "more ranks (trainer.n_gpus_per_node), fsdp_config.optimizer_offload=true (on CUDA; the "
        "update itself needs it all the same), or actor_rollout_ref.model.lora_rank"
    ),
    "activations": (
        "model.enable_gradient_checkpointing=true, smaller micro-batches "
        "(ppo_max_token_len_per_gpu, of the other passes log_prob_max_token_len_per_gpu), or "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    ),
    "logits": (
        "smaller micro-batches: ppo_max_token_len_per_gpu, of the other passes "
        "log_prob_max_token_len_per_gpu; with the hf engine "
        "actor_rollout_ref.rollout.max_num_seqs"
    ),
    "KV cache": (
        "actor_rollout_ref.rollout.gpu_memory_utilization (on CUDA), "
        "actor_rollout_ref.rollout.max_num_seqs (on a CPU), or "
        "actor_rollout_ref.rollout.tensor_model_parallel_size"
    ),
    "copies": (
        "fsdp_config.reshard_after_forward=true or more ranks; a checkpoint's fall to a third "
        "without optimizer in checkpoint.save_contents"
    ),
}
PHASE_WIDTH = 13
COLUMN_WIDTH = 12
# Below this a table is in MiB, as two digits behind the point would show nothing.
FEWEST_GIB = 0.1
MIB = 2**20

Phases = Mapping[Phase, MemoryTerms]


def columns(terms: MemoryTerms) -> dict[str, int]:
    """Returns the bytes of each term under its title, that of its advice."""
    return {
        "weights": terms.weights,
        "gradients": terms.gradients,
        "optimiser": terms.optimiser,
        "activations": terms.activations,
        "logits": terms.logits,
        "KV cache": terms.kv_cache,
        "copies": terms.copies,
    }


def write_table(plans: Mapping[int, Phases], *, model_path: str, num_ranks: int) -> str:
    """Writes the plan for the smallest device that holds it, or the largest, if none does.

    Args:
        plans: what each phase takes, by GiB of the device.
    """
    fitting = [size for size, phases in plans.items() if fits(phases, size)]
    size = min(fitting, default=max(plans))
    phases = plans[size]
    largest = largest_phase(phases)
    most = phases[largest].total()
    unit, unit_bytes = ("GiB", GIB) if most >= FEWEST_GIB * GIB else ("MiB", MIB)
    lines = [
        f"{model_path}: {unit} on each of {num_ranks} rank(s), of {size} GiB",
        write_header(),
        *(write_row(phase, terms, unit_bytes) for phase, terms in phases.items()),
        f"largest: {largest}, {most / unit_bytes:.2f} {unit}; "
        f"does it fit? {write_verdicts(list(plans), fitting)}",
    ]
    if len(fitting) < len(plans):
        lines.append(write_advice(largest, phases[largest]))
    return "\n".join(lines)


def fits(phases: Phases, size: int) -> bool:
    """Checks whether a device of so many GiB holds every phase, and leaves room for a cache."""
    holds_all = phases[largest_phase(phases)].total() <= size * GIB
    return holds_all and phases["generation"].kv_cache > 0


def largest_phase(phases: Phases) -> Phase:
    """Returns the phase that takes most."""
    return max(phases, key=lambda phase: phases[phase].total())


def write_header() -> str:
    """Writes the titles of the columns."""
    titles = [f"{title:>{COLUMN_WIDTH}}" for title in (*ADVICE, "total")]
    return " " * PHASE_WIDTH + "".join(titles)


def write_row(phase: Phase, terms: MemoryTerms, unit_bytes: int) -> str:
    """Writes what one phase takes, in units of so many bytes."""
    sizes = [*columns(terms).values(), terms.total()]
    cells = [f"{size / unit_bytes:{COLUMN_WIDTH}.2f}" for size in sizes]
    return f"{phase:<{PHASE_WIDTH}}" + "".join(cells)


def write_verdicts(sizes: list[int], fitting: list[int]) -> str:
    """Writes whether each device holds the run: "24 GiB: NO, 40 GiB: yes"."""
    verdicts = []
    for size in sizes:
        verdict = "yes" if size in fitting else "NO"
        verdicts.append(f"{size} GiB: {verdict}")
    return ", ".join(verdicts)


def write_advice(phase: Phase, terms: MemoryTerms) -> str:
    """Writes what to change where a phase does not fit: by the term that takes most of it."""
    sizes = columns(terms)
    largest_term = max(sizes, key=lambda title: sizes[title])
    return f"{phase} takes most for {largest_term}; less with {ADVICE[largest_term]}"
