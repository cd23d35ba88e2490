"""Lists the runs of scripts/same_numbers.py, and makes the models and files that they need.

Every run is deterministic, on the quickstart's game or on the tiny prompts, and small: 4 tasks a
step, 4 episodes a task, 3 steps. Invariant: a run's command line is the same for every tree.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

STEPS = 3
# A start that hangs is ended after so many seconds.
LIMIT_S = 600

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
GAME = "configs/quickstart.yaml"
PROMPTS = "configs/tiny_prompts.yaml"
PROGRAM = "configs/quickstart_program.yaml"
# Settings of every run; those of a run follow and win.
COMMON = (
    "data.train_batch_size=4",
    "data.seed=7",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.max_num_seqs=32",
    f"{ACTOR}.ppo_mini_batch_size=2",
    "trainer.deterministic=true",
    "trainer.logger=file",
    "trainer.resume_mode=auto",
)
# In settings, the folder of what `prepare` makes.
FILES = "{files}"
GRPO = ("algorithm.adv_estimator=grpo",)
# An environment of `env_template`.
PLAYED = "{path: examples/quickstart_game.py, cls: TerseGuessNumber}"
# A history that drops odd guesses, so that episodes have several rows.
FORGETFUL = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} "
    "{% if m['role'] == 'assistant' and not loop.last"
    " and m['content'].strip() in ['1', '3', '5', '7', '9'] %}number"
    "{% else %}{{ m['content'] }}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
TWO_REWARDS = '''"""Scores an answer twice, for gdpo."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Returns the kinds of reward `hit` and `form`."""
    digits = "".join(letter for letter in solution_str if letter.isdigit())
    number = float(digits or 0)
    return {"score": 1.0, "hit": number % 2, "form": number}
'''


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Describes one run.

    Attributes:
        name: what `--runs` calls it.
        settings: overrides beside COMMON.
        config: the config file, from the tree's folder.
        starts: the steps that the run has after each start; a start after the first resumes.
        alone: starts `main.py` in a Python of its own, as engines and Ray want it; else it is
            forked from one that has torch loaded (scripts/same_starts.py).
        features: those whose settings it has.
    """

    name: str
    settings: tuple[str, ...]
    config: str = GAME
    starts: tuple[int, ...] = (STEPS,)
    alone: bool = False
    features: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        """Returns the step of the last checkpoint."""
        return self.starts[-1]

    def argv(self, folder: Path, files: Path, steps: int) -> list[str]:
        """Writes the arguments of `main.py` for a start.

        Args:
            folder: the run's folder.
            files: what `prepare` has made.
            steps: at which this start ends, with a checkpoint.
        """
        model = "prompts" if self.config == PROMPTS else "quickstart"
        settings = [*COMMON, f"actor_rollout_ref.model.path={files}/{model}/model"]
        if self.config == PROMPTS:
            settings.append(f"data.train_files={files}/prompts/train.parquet")
            settings.append(f"data.val_files={files}/prompts/val.parquet")
            settings.append("data.val_max_samples=8")
        else:
            settings.append("agent.val_length=4")
        settings += [setting.replace(FILES, str(files)) for setting in self.settings]
        settings.append(f"trainer.total_training_steps={steps}")
        settings.append(f"trainer.save_freq={steps}")
        settings.append(f"trainer.default_local_dir={folder}")
        settings.append(f"trainer.rollout_data_dir={folder}/texts")
        settings.append(f"trainer.validation_data_dir={folder}/validation_texts")
        return [self.config, *settings]


def _estimator(name: str, *settings: str, config: str = GAME) -> ComparedRun:
    """Describes a run of an estimator with the vanilla loss."""
    chosen = (f"algorithm.adv_estimator={name}", *settings)
    return ComparedRun(name=name, settings=chosen, config=config)


def _loss(name: str, *settings: str) -> ComparedRun:
    """Describes a run of a loss with grpo."""
    chosen = (*GRPO, f"{ACTOR}.policy_loss.loss_mode={name}", *settings)
    return ComparedRun(name=f"loss_{name}", settings=chosen)


def _grpo(
    name: str, *settings: str, config: str = GAME, features: tuple[str, ...] = ()
) -> ComparedRun:
    """Describes a run of grpo with further settings."""
    return ComparedRun(name=name, settings=(*GRPO, *settings), config=config, features=features)


WHOLE_RUNS = (
    ComparedRun(name="hf_gae", settings=(), starts=(4, 6)),
    _grpo("hf_grpo"),
    ComparedRun(name="prompts_gae", settings=(), config=PROMPTS),
    _grpo("prompts_grpo", f"{ACTOR}.use_kl_loss=true", config=PROMPTS),
    ComparedRun(name="program", settings=GRPO, config=PROGRAM, features=("programs",)),
    ComparedRun(name="vllm_grpo", settings=(*GRPO, f"{ROLLOUT}.name=vllm"), alone=True),
    ComparedRun(
        name="two_ranks",
        settings=("trainer.launcher=ray", "trainer.n_gpus_per_node=2"),
        alone=True,
    ),
    ComparedRun(
        name="async_level",
        settings=(*GRPO, "trainer.rollout_n_gpus=1", "trainer.async_level=1"),
        starts=(2, 4),
        alone=True,
    ),
)
PARTS_OF_A_RUN = (
    _grpo("lora", "actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.use_kl_loss=true"),
    ComparedRun(name="shared_critic", settings=("critic.share_backbone=true",)),
    ComparedRun(
        name="several_rows",
        settings=(
            f"actor_rollout_ref.model.path={FILES}/forgetful/model",
            "data.max_prompt_length=40",
        ),
    ),
    _grpo(
        "several_rows_seq_mean",
        f"actor_rollout_ref.model.path={FILES}/forgetful/model",
        "data.max_prompt_length=40",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    ),
    _grpo(
        "finished_groups",
        "trainer.train_finished_groups=true",
        f"{ACTOR}.ppo_mini_batch_size=null",
        f"{ACTOR}.ppo_epochs=1",
    ),
    _grpo("filter_groups", "algorithm.filter_groups.enable=true", f"{ROLLOUT}.n=2"),
    # Two environments in turn, and a validation that samples.
    _grpo(
        "mix",
        "agent.environment.path=null",
        "agent.environment.cls=null",
        f"env_template=[{PLAYED}, {PLAYED}]",
        f"{ROLLOUT}.val_kwargs={{do_sample: true, temperature: 0.8, n: 2}}",
    ),
    _grpo(
        "reward_model",
        "reward_model.enable=true",
        "reward_model.model.dtype=float32",
        f"reward_model.model.path={FILES}/scorer",
        "reward_model.micro_batch_size_per_gpu=3",
    ),
    ComparedRun(
        name="micro_batches",
        settings=(
            f"{ACTOR}.ppo_max_token_len_per_gpu=96",
            "critic.ppo_max_token_len_per_gpu=96",
            f"{ACTOR}.shuffle=true",
        ),
    ),
    # Nothing that watches or records.
    _grpo(
        "unwatched",
        "trainer.alarms=off",
        "agent.episodes_keep=0",
        features=("alarms", "records"),
    ),
    _grpo("observation_loss", "agent.observation_loss_coef=0.5", f"{ACTOR}.entropy_coeff=0.01"),
    _grpo("record_gradients", "agent.record_gradients=true", features=("records",)),
    _grpo("pf_ppo", "algorithm.use_pf_ppo=true"),
    _grpo("seq_mean", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"),
    _grpo("packed", "actor_rollout_ref.model.use_remove_padding=true"),
    _grpo("bfloat16", f"{ROLLOUT}.dtype=bfloat16", "actor_rollout_ref.model.dtype=bfloat16"),
    _grpo("kl_loss", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=low_var_kl"),
    ComparedRun(
        name="kl_in_reward",
        settings=("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"),
    ),
    _grpo("rollout_is", f"{CORRECTION}.rollout_is=token", f"{ROLLOUT}.dtype=bfloat16"),
    _grpo(
        "bypass_mode",
        f"{CORRECTION}.bypass_mode=true",
        f"{CORRECTION}.loss_type=reinforce",
        f"{CORRECTION}.rollout_is=token",
    ),
    _grpo(
        "rejection",
        f"{CORRECTION}.rollout_rs=seq_mean_k1",
        f"{CORRECTION}.rollout_rs_threshold=0.999_1.001",
        f"{ROLLOUT}.dtype=bfloat16",
    ),
    ComparedRun(
        name="custom_algorithm",
        config=PROMPTS,
        settings=(
            f"custom_algorithm={FILES}/custom_algorithm.py",
            "algorithm.adv_estimator=group_rank",
            f"{ACTOR}.policy_loss.loss_mode=soft_clip",
            f"{ACTOR}.policy_loss.custom_kwargs.sharpness=4",
        ),
    ),
)
ESTIMATORS = (
    _estimator("rloo"),
    _estimator("reinforce_plus_plus"),
    _estimator("reinforce_plus_plus_baseline"),
    _estimator("remax"),
    _estimator("opo"),
    _estimator("gpg"),
    _estimator("maxrl"),
    _estimator("rae"),
    _estimator("grpo_passk"),
    _estimator("turn_gae", "algorithm.turn_lam=0.9"),
    _estimator("turn_return", "algorithm.turn_gamma=0.9"),
    _estimator("gigpo"),
    _estimator("optimal_token_baseline"),
    _estimator("tir_optimal_token_baseline"),
    _estimator(
        "gdpo",
        "algorithm.gdpo_reward_keys=[hit,form]",
        f"custom_reward_function.path={FILES}/two_rewards.py",
        config=PROMPTS,
    ),
    _estimator(
        "on_policy_distillation",
        "algorithm.distillation_task=grpo",
        f"actor_rollout_ref.ref.model.path={FILES}/prompts/model",
    ),
)
LOSSES = (
    _loss("gspo"),
    _loss("geo_mean"),
    _loss("gpg"),
    _loss("cispo"),
    _loss("sapo"),
    _loss("clip_cov", f"{ACTOR}.policy_loss.clip_cov_ratio=0.1"),
    _loss("kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio=0.1"),
    _loss("dppo_tv"),
    _loss("dppo_kl"),
    _loss("dro", f"{ACTOR}.policy_loss.dro_beta=0.1"),
)
RUNS: dict[str, ComparedRun] = {
    run.name: run for run in (*WHOLE_RUNS, *PARTS_OF_A_RUN, *ESTIMATORS, *LOSSES)
}


def prepare(files: Path, tree: Path, python: str) -> None:
    """Makes the models with a tree's examples, and the files of users; what is there stays."""
    for name in ("quickstart", "prompts"):
        if (files / name).is_dir():
            continue
        example = "quickstart" if name == "quickstart" else "tiny_prompts"
        command = [python, f"examples/prepare_{example}.py", "--out", str(files / name)]
        subprocess.run(command, cwd=tree, env=environment(), check=True, timeout=LIMIT_S)
    forgetful = files / "forgetful/model"
    if not forgetful.is_dir():
        shutil.copytree(files / "quickstart/model", forgetful)
    (forgetful / "chat_template.jinja").write_text(FORGETFUL)
    if not (files / "scorer").is_dir():
        _make_scorer(files / "scorer", files / "quickstart/model")
    if not (files / "custom_algorithm.py").is_file():
        shutil.copy(tree / "examples/custom_algorithm.py", files)
    (files / "two_rewards.py").write_text(TWO_REWARDS)


def _make_scorer(folder: Path, policy: Path) -> None:
    """Makes a tiny reward model with random weights, which has the policy's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(3)
    config = LlamaConfig.from_pretrained(policy, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)


def texts_digest() -> str:
    """Returns a digest of the files that are written from texts here."""
    return hashlib.sha256((TWO_REWARDS + FORGETFUL).encode()).hexdigest()[:12]


def environment() -> dict[str, str]:
    """Returns the environment variables of a run: one thread, nothing from the network."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    fixed = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return kept | fixed
