"""Plans a run's memory before it starts: what each rank holds in each phase of a step (`--plan`).

Models are built without numbers (fake tensors), and the run's own code, its layout of rows,
forward, loss and backward, goes once over the largest micro-batch of full rows, while a tracker
adds up the bytes that live: so the plan follows the code. The rest is computed: weights
that FSDP2 gathers, engines' caches, copies for weight sync and checkpoints.

    planner.py          `Planner`: all that a rank holds, phase by phase
    planned_run.py      what of a config the plan needs
    models.py           the models of a rank, built without numbers, and the passes over them
    model_phases.py     what a model takes in each phase
    engine_phases.py    what the rollout engine takes
    forward_pass.py     the peak of a pass over the largest micro-batch
    live_memory.py      the tracker
    terms.py            the bytes by what takes them, and the names of the phases
    table.py            the table that is printed, and the advice below it

Invariant: nothing of the size of a weight is allocated. On CUDA attention counts as its kernels
hold it, on a CPU as blocks of segments do. Blocks that allocators keep, and CUDA itself (about
1 GiB), come on top.
"""
