"""Tests that verl's keys and launch scripts load, and its config classes construct."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT
from tests.unit.config.helpers import ACTOR, ROLLOUT, checked, load, problems_of
from training.config import PPOConfig
from training.config.explain import explain_run
from training.config.loader import ConfigError, load_config
from training.core_algos import PolicyLossConfig, compute_policy_loss_vanilla


@pytest.mark.parametrize(
    ("override", "new"),
    [
        ("algorithm.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio=0.3"),
        (
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
            "actor_rollout_ref.actor.optim.scheduler=cosine",
        ),
        ("critic.optim.warmup_style=constant", "critic.optim.scheduler=constant"),
        ("actor_rollout_ref.rollout.prompt_length=64", "data.max_prompt_length=64"),
        ("critic.model.fsdp_config.param_offload=True", "critic.fsdp_config.param_offload=True"),
        ("algorithm.advantage_estimation=rloo", "algorithm.adv_estimator=rloo"),
        ("algorithm.advantage_estimator=rloo", "algorithm.adv_estimator=rloo"),
        ("advantage_estimation=rloo", "algorithm.adv_estimator=rloo"),
        (f"{ACTOR}.policy_loss.tau_pos=1.5", f"{ACTOR}.tau_pos=1.5"),
        (f"{ACTOR}.policy_loss.tau_neg=1.5", f"{ACTOR}.tau_neg=1.5"),
        (
            "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
            "reward_model.overlong_buffer.penalty_factor=0.5",
        ),
        (
            "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
            "reward_model.overlong_buffer.enable=true",
        ),
        ("reward_model.reward_kwargs.max_resp_len=64", "data.max_response_length=64"),
        (
            "custom_reward_function.overlong_buffer.len=64",
            "reward_model.overlong_buffer.len=64",
        ),
        (
            "actor_rollout_ref.model.use_rmpad=False",
            "actor_rollout_ref.model.use_remove_padding=false",
        ),
        (
            "algorithm.rollout_correction.bypass_old_logprob_for_rollout=True",
            "algorithm.rollout_correction.bypass_mode=True",
        ),
        ("async_training.partial_rollout=False", f"{ROLLOUT}.update_in_flight=False"),
        ("rollout.total_epochs=3", "trainer.total_epochs=3"),
        ("reward.reward_kwargs.mine=64", "reward_model.reward_kwargs.mine=64"),
        (
            "distillation.teacher_models.teacher_model.model_path=teacher",
            "actor_rollout_ref.ref.model.path=teacher",
        ),
    ],
)
def test_a_key_that_moved_is_taken_with_a_word(
    override: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(override) == load(new)
    assert f"is called {new.split('=')[0]} here" in caplog.text


@pytest.mark.parametrize(
    ("override", "new"),
    [
        (
            "algorithm.rollout_correction.use_policy_gradient=True",
            "algorithm.rollout_correction.loss_type=reinforce",
        ),
        ("distillation.enabled=True", "algorithm.adv_estimator=on_policy_distillation"),
        (
            "algorithm.rollout_correction.use_pure_rollout_correction=True",
            "algorithm.rollout_correction.loss_type=reinforce",
        ),
        (f"{ACTOR}.use_gpg_loss=True", f"{ACTOR}.policy_loss.loss_mode=gpg"),
        (f"{ACTOR}.use_token_level_loss=True", f"{ACTOR}.loss_agg_mode=token-mean"),
        ("reward.reward_manager.name=gdpo", "reward_model.reward_manager=naive"),
        ("trainer.v1.trainer_mode=separate_async", "trainer.async_level=1"),
    ],
)
def test_a_value_that_has_a_key_here_is_translated_with_a_word(
    override: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(override) == load(new)
    (message,) = caplog.messages
    assert message.replace(" (command line)", "") == f"{override} is {new} here; set"


def test_engines_with_ranks_of_their_own_are_counted_as_verl_does() -> None:
    own = ["actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=4"]
    ours = "trainer.rollout_n_gpus"
    nodes, ranks = f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=3"
    assert load(*own, nodes, ranks).trainer.rollout_n_gpus == 6
    assert load(*own, nodes).trainer.rollout_n_gpus == 8
    assert load(*own, "rollout.nnodes=1", "rollout.n_gpus_per_node=2").trainer.rollout_n_gpus == 2
    assert load(*own, nodes, ranks, f"{ours}=5").trainer.rollout_n_gpus == 5
    assert load_config([*own, nodes], check=False).sources[ours] == "verl's rollout.nnodes"
    # Theirs at rest ask for nothing.
    assert load(f"{ROLLOUT}.nnodes=0", ranks).trainer.rollout_n_gpus == 0
    (problem,) = problems_of(*own)
    assert problem.endswith(
        "gives engines ranks of their own: set how many, trainer.rollout_n_gpus"
    )


def test_a_response_length_that_the_penalty_has_of_its_own_is_an_error() -> None:
    theirs, ours = "reward_model.reward_kwargs.max_resp_len", "data.max_response_length"
    assert load(f"{theirs}=64", f"{ours}=64") == load(f"{ours}=64")
    linked = load(f"{theirs}='${{{ours}}}'", f"{ours}=64")
    assert linked == load(f"{ours}=64")
    (problem,) = problems_of(f"{theirs}=65", f"{ours}=64")
    assert problem == f"{theirs}=65 and {ours}=64 are the same limit: give one"


def test_links_may_be_relative_and_name_verls_keys(tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text(
        "actor_rollout_ref:\n"
        "  actor:\n"
        "    optim: {lr: 2e-6, warmup_style: cosine, min_lr_ratio: null}\n"
        "    clip_ratio_low: '${.clip_ratio}'\n"
        "    clip_ratio: 0.3\n"
        "    checkpoint: {save_contents: [model, extra], load_contents: '${.save_contents}'}\n"
        "    entropy_coeff: '${..rollout.temperature}'\n"
        "  rollout:\n"
        "    name: ???\n"
        "    prompt_length: '${oc.select:data.max_prompt_length,512}'\n"
        "    response_length: '${oc.select:data.max_response_length, 512}'\n"
        "critic:\n"
        "  ppo_micro_batch_size_per_gpu: '${oc.select:.ppo_micro_batch_size,null}'\n"
        "  model: {fsdp_config: {param_offload: true, optimizer_offload: '${.param_offload}'}}\n"
        "  optim:\n"
        "    scheduler: '${actor_rollout_ref.actor.optim.warmup_style}'\n"
        "    min_lr_ratio: null\n"
    )
    config = load(str(tmp_path / "verl.yaml"))
    actor = config.actor_rollout_ref.actor
    assert actor.checkpoint.load_contents == ("model", "extra")
    assert (actor.clip_ratio_low, actor.entropy_coeff, actor.optim.min_lr_ratio) == (0.3, 1.0, 0.0)
    assert config.actor_rollout_ref.rollout.name == PPOConfig().actor_rollout_ref.rollout.name
    assert (config.data.max_prompt_length, config.actor_rollout_ref.rollout.response_length) == (
        512,
        512,
    )
    critic = config.critic
    assert critic.ppo_micro_batch_size_per_gpu is None and critic.fsdp_config.optimizer_offload
    assert critic.optim.scheduler == "cosine"


def test_many_of_verls_keys_are_one_line_and_a_list_under_explain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = [line for line in DEFAULTS if line.startswith(f"{ACTOR}.profiler.")]
    assert len(given) > 8
    loaded = load_config(given, check=False)
    assert caplog.messages == [
        f"{len(given)} of verl's keys (command line) have no effect or another name here: "
        "--explain lists them"
    ]
    listed = explain_run(loaded)
    for line in given:
        assert f"{line.split('=')[0]}=" in listed
    caplog.clear()
    assert load_config(given[:8], check=False).notes == ()
    assert len(caplog.messages) == 8


def test_verls_way_to_say_no_lower_clip_is_taken() -> None:
    config = load(f"{ACTOR}.clip_ratio_low=10", f"{ACTOR}.clip_ratio_high=0.2")
    actor = config.actor_rollout_ref.actor
    ratio = torch.tensor([[1e-4, 0.5, 1.3]]).log()
    mask = torch.ones(1, 3, dtype=torch.long)
    loss, metrics = compute_policy_loss_vanilla(
        torch.zeros(1, 3),
        ratio,
        -torch.ones(1, 3),
        mask,
        config=PolicyLossConfig(
            clip_ratio_low=actor.clip_ratio_low, clip_ratio_high=actor.clip_ratio_high
        ),
    )
    assert metrics["actor/pg_clipfrac"] == 0
    assert loss.item() == pytest.approx(float(ratio.exp().mean()), rel=1e-5)


def test_verls_manager_of_several_rewards_is_told_where_they_go(runnable: list[str]) -> None:
    (problem,) = checked(runnable, "reward_model.reward_manager=gdpo")
    assert "set algorithm.adv_estimator=gdpo and algorithm.gdpo_reward_keys" in problem
    assert "dapo" not in problem


def test_a_part_that_is_not_there_may_be_switched_off_but_not_on() -> None:
    off = [
        "trainer.default_hdfs_dir=null",
        "algorithm.use_pf_ppo=False",
        f"{ROLLOUT}.multi_turn.enable=False",
    ]
    assert load(*off) == PPOConfig()
    (problem,) = problems_of(f"{ROLLOUT}.multi_turn.interaction_config_path=users.yaml")
    assert problem.endswith(
        "name the environment under agent.environment, tools and their parser under agent"
    )


DEFAULTS = (Path(__file__).parent / "verl_defaults.txt").read_text().splitlines()


@pytest.mark.long
def test_every_key_of_verl_loads_at_its_default_with_a_line_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Takes verl 0.6.1's, 0.7.1's and 0.9.1's keys, each at its default or defaults."""
    refused, wordy = [], []
    for line in DEFAULTS:
        caplog.clear()
        try:
            load(str(PROJECT / "configs/gsm8k_grpo.yaml"), line)
        except ConfigError as error:
            refused += error.problems
        wordy += caplog.messages[1:]
    assert len(DEFAULTS) > 900 and refused == wordy == []


@pytest.mark.seconds
def test_verls_defaults_are_within_the_bounds_here(runnable: list[str]) -> None:
    """Leaves out what needs other keys at verl's defaults too, or its machine and files."""
    apart = ("tensor_model_parallel_size", "use_dynamic_bsz", ".path", "_files", "trainer.device")
    ours = [line for line in DEFAULTS if not line.partition("=")[0].endswith(apart)]
    assert not [
        text for text in checked(runnable, *ours) if " must be " in text and "multiple" not in text
    ]


@pytest.mark.parametrize(
    "override",
    [
        *(
            f"{ACTOR}.optim.clip_grad=0.5",
            f"{ACTOR}.fsdp_config.dtype=float16",
        ),
        *(
            f"{ACTOR}.router_replay.mode=R2",
            f"{ACTOR}.qat.enable=true",
            "critic.loss_scale_factor=512",
        ),
        *(
            f"{ROLLOUT}.pipeline_model_parallel_size=2",
            f"{ROLLOUT}.do_sample=false",
            f"{ROLLOUT}.quantization=fp8",
        ),
        *(
            f"{ROLLOUT}.multi_turn.max_tool_response_length=1024",
            f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        ),
        *(
            "critic.model.lora_rank=8",
            "critic.model.lora.rank=8",
            "critic.model.mtp.enable_train=true",
        ),
        *(
            "actor_rollout_ref.model.lora.dropout=0.1",
            "actor_rollout_ref.model.lora_adapter_path=adapter",
        ),
        *(
            "actor_rollout_ref.model.exclude_modules=[q_proj]",
            "actor_rollout_ref.model.lora.type=dora",
        ),
        *(
            "reward.sandbox_fusion.url=http://localhost",
            "async_training.use_dynamic_resource_scheduling=true",
        ),
        *(
            "reward_model.enable_resource_pool=true",
            "model_engine=veomni",
            "trainer.v1.trainer_mode=colocate_async",
        ),
        *("skip.rollout.enable=true", "reward_model.reward_manger=naive", "data.promt_key=text"),
        *("actor_rollout_ref.model.lora_ranks=8", f"{ACTOR}.fsdp_config.use_orig_param=true"),
    ],
)
def test_what_asks_for_a_part_that_is_not_there_stays_an_error(override: str) -> None:
    (problem,) = problems_of(override)
    assert problem.startswith(f"{override.split('=')[0]}=")


def test_a_yaml_of_verls_may_name_its_classes_and_link_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "verl.yaml").write_text(
        "actor_rollout_ref:\n  actor: {_target_: verl.Actor, optim: {_target_: verl.Optim, lr: "
        "2e-6}}\n"
        "  rollout: {mtp: '${oc.select:actor_rollout_ref.model.mtp, null}', multi_turn: "
        "{tool_config_path: null}}\n"
    )
    config = load(str(tmp_path / "verl.yaml"))
    assert (config.actor_rollout_ref.actor.optim.lr, config.agent.tools, caplog.messages) == (
        2e-6,
        (),
        [],
    )


def test_verls_file_of_tools_is_an_entry_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = f"{ROLLOUT}.multi_turn.tool_config_path"
    assert load(f"{theirs}=tools.yaml").agent.tools == ("tools.yaml",)
    assert load(f"{theirs}=null").agent.tools == load(f"{theirs}=None").agent.tools == ()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").mkdir()
    assert load(f"{theirs}=configs/agent.yaml").agent.tools == (
        str(PROJECT / "configs/agent.yaml"),
    )
    assert load("agent.tools=[python]").agent.tools == ("python",)


def test_verls_newer_keys_of_lora_are_ours() -> None:
    theirs, ours = "actor_rollout_ref.model.lora", "actor_rollout_ref.model.lora_rank"
    model = load(
        f"{theirs}.rank=8", f"{theirs}.alpha=32", f"{theirs}.target_modules=[q_proj]"
    ).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 32, ("q_proj",))
    assert load("actor_rollout_ref.model.target_modules=all-linear") == PPOConfig()
    # verl's files hold both, of which one is not used.
    assert load(f"{ours}=8", f"{theirs}.rank=8").actor_rollout_ref.model.lora_rank == 8
    (problem,) = problems_of(f"{ours}=8", f"{theirs}.rank=0")
    assert problem == f"{theirs}.rank=0 and {ours}=8 are the same limit: give one"


def test_several_turns_need_an_environment() -> None:
    several = f"{ROLLOUT}.multi_turn.enable=True"
    assert load(several, "agent.environment.name=gymnasium:FrozenLake-v1").environments
    (problem,) = problems_of(several)
    assert "set what the agent acts in, agent.environment.name or .path, or give tools" in problem


def test_verls_turn_limit_and_ours_are_one() -> None:
    theirs = f"{ROLLOUT}.multi_turn.max_assistant_turns"
    assert load(f"{theirs}=4").agent.max_turn == 4
    assert load(f"{theirs}=4", "agent.max_turn=4").agent.max_turn == 4
    for given in ([f"{theirs}=4", "agent.max_turn=5"], ["agent.max_turn=5", f"{theirs}=4"]):
        (problem,) = problems_of(*given)
        assert "are the same limit: give one" in problem


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params=0",
        "actor_rollout_ref.ref.fsdp_config.fsdp_size=-1",
        "critic.model.fsdp_config.grad_offload=False",
        "actor_rollout_ref.rollout.disable_log_stats=False",
        "actor_rollout_ref.ref.log_prob_micro_batch_size=128",
    ],
)
def test_a_key_without_meaning_here_is_logged_and_changes_nothing(
    override: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(override) == PPOConfig()
    assert "has no effect here" in caplog.text


def test_verls_defaults_that_mean_nothing_here_are_said_and_refused_ones_can_be_taken_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(
        "actor_rollout_ref: {rollout: {mode: async, over_sample_rate: 0, trace: {backend: null}, "
        "agent: {num: 8}},\n"
        "  ref: {ulysses_sequence_parallel_size: 1}}\n"
        "global_profiler: {tool: null}\ndata: {gen_batch_size: null}\ncritic: {fsdp: "
        "{param_offload: true}}\n"
    )
    with pytest.raises(ConfigError, match=r"rollout\.agent\.num"):
        load_config([str(file)], check=False)
    taken_back = [f"~{ROLLOUT}.agent", "~global_profiler.tool", f"{ACTOR}.use_kl_loss="]
    config = load_config([str(file), *taken_back], check=False).config
    assert (
        config.critic.fsdp_config.param_offload and not config.actor_rollout_ref.actor.use_kl_loss
    )
    for name in (
        "over_sample_rate",
        "trace.backend",
        "ref.ulysses",
        "global_profiler.tool",
        "gen_batch_size",
    ):
        assert any(name in line and "no effect here" in line for line in caplog.messages)
    assert f"{ACTOR}.use_kl_loss= (command line) has no value" in caplog.text


def test_verls_config_classes_are_constructors() -> None:
    import training.config as names

    actor = names.FSDPActorConfig(ppo_mini_batch_size=4, optim=names.OptimizerConfig(lr=3e-6))
    assert (actor.ppo_mini_batch_size, actor.optim.lr) == (4, 3e-6)
    assert names.FSDPCriticConfig(enable=True).enable and names.HFModelConfig(path="m").path == "m"
    assert names.AlgoConfig(gamma=0.9).gamma == 0.9 and names.RolloutConfig(n=4).n == 4


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            f"{ACTOR}.megatron.tensor_model_parallel_size=4",
            f"{ACTOR}.megatron.tensor_model_parallel_size=4 (command line): the Megatron backend "
            "is not there; use actor_rollout_ref.actor.strategy=fsdp2",
        ),
        (
            "actor_rollout_ref.hybrid_engine=false",
            "actor_rollout_ref.hybrid_engine=False gives engines ranks of their own: set how many, "
            "trainer.rollout_n_gpus",
        ),
    ],
)
def test_a_key_of_what_is_not_there_is_told_what_to_write(override: str, problem: str) -> None:
    assert problems_of(override) == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "defaults: [{data: mine}]\n",
            "run.yaml: `defaults:` with {'data': 'mine'} is Hydra's; write `extends: other.yaml`",
        ),
        (
            "defaults: [ppo_megatron_trainer, _self_]\n",
            "run.yaml: `defaults:` with 'ppo_megatron_trainer' is Hydra's; write",
        ),
    ],
)
def test_hydras_defaults_are_explained_and_what_they_left_out_is_not_called_missing(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config([str(tmp_path / "run.yaml")])
    (found,) = caught.value.problems
    assert problem in found


# A word of the command line that takes a section back takes its other names back with it.
@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.clip_ratio=0.3", "~algorithm"],
        ["algorithm.clip_ratio=0.3", "~algorithm.clip_ratio"],
        ["actor_rollout_ref.model.lora.rank=4", "~actor_rollout_ref.model.lora"],
        ["agent.max_steps=3", "~agent.max_turn"],
        ["actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3", "~agent"],
        [f"{ROLLOUT}.multi_turn.max_assistant_turns=3", f"~{ROLLOUT}"],
    ],
)
def test_other_names_go_back_to_their_defaults_with_a_section(words: list[str]) -> None:
    loaded = load_config(words, check=False)
    assert set(loaded.sources.values()) == {"default"}
