"""SHIM: the names of this module stand in the files that they are imported from."""

from workers.weight_sync.canary import CONVERSATION as CONVERSATION
from workers.weight_sync.canary import LENGTH as LENGTH
from workers.weight_sync.canary import SEQUENCES as SEQUENCES
from workers.weight_sync.canary import Canary as Canary
from workers.weight_sync.load_trial import LoadTrial as LoadTrial
from workers.weight_sync.manifest import Manifest as Manifest
from workers.weight_sync.manifest import as_announced as as_announced
from workers.weight_sync.manifest import check_manifest as check_manifest
from workers.weight_sync.manifest import iter_weights as iter_weights
from workers.weight_sync.manifest import refuse as refuse
from workers.weight_sync.manifest import weight_manifest as weight_manifest
from workers.weight_sync.saved_form import SavedForm as SavedForm
