"""SHIM: aggregation.py, kl.py, value_loss.py and pf_ppo.py hold these names now."""

from training.core_algos.aggregation import LOSS_AGG_MODES as LOSS_AGG_MODES
from training.core_algos.aggregation import GlobalBatchInfo as GlobalBatchInfo
from training.core_algos.aggregation import agg_loss as agg_loss
from training.core_algos.aggregation import denominators as denominators
from training.core_algos.aggregation import token_fraction as token_fraction
from training.core_algos.kl import KL_KINDS as KL_KINDS
from training.core_algos.kl import MAX_LOG_RATIO as MAX_LOG_RATIO
from training.core_algos.kl import AdaptiveKLController as AdaptiveKLController
from training.core_algos.kl import FixedKLController as FixedKLController
from training.core_algos.kl import get_kl_controller as get_kl_controller
from training.core_algos.kl import kl_penalty as kl_penalty
from training.core_algos.pf_ppo import compute_pf_ppo_reweight_data as compute_pf_ppo_reweight_data
from training.core_algos.value_loss import compute_value_loss as compute_value_loss
