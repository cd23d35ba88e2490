"""SHIM: the names of the forward pass under the module that had them all."""

from workers.model.forward_settings import ForwardSettings as ForwardSettings
from workers.model.forward_settings import forward_settings as forward_settings
from workers.model.logit_form import logit_form as logit_form
from workers.model.loss_fields import FORWARD_FIELDS as FORWARD_FIELDS
from workers.model.loss_fields import loss_fields as loss_fields
from workers.model.micro_batches import iter_micro_batches as iter_micro_batches
from workers.model.micro_batches import plan_batch as plan_batch
from workers.model.micro_batches import read_rows as read_rows
from workers.model.micro_batches import scatter_tokens as scatter_tokens
from workers.model.packing import ForwardBatch as ForwardBatch
from workers.model.packing import RowTokens as RowTokens
from workers.model.packing import build_forward_batch as build_forward_batch
from workers.model.packing import row_tokens as row_tokens
from workers.model.packing_check import attends_fully as attends_fully
from workers.model.packing_check import check_forward as check_forward
from workers.model.packing_check import pack_rows as pack_rows
from workers.model.policy_model import LOGITS_CHUNK_BYTES as LOGITS_CHUNK_BYTES
from workers.model.policy_model import PolicyModel as PolicyModel
from workers.model.policy_model import PolicyValueModel as PolicyValueModel
from workers.model.policy_model import ValueModel as ValueModel
from workers.model.shared_prefix import key_cost as key_cost
