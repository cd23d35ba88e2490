"""Says in one line when something silently goes wrong in a run.

`monitor` runs the rules after every step; `catalogue` names the alarms and what to check. The rules
stand by what they look at: `batch_rules`, `reward_rules`, `engine_rules`, `update_rules`,
`machine_rules`, and others.
"""

from features.alarms.catalogue import ADVICE as ADVICE
from features.alarms.monitor import Alarms as Alarms
from features.alarms.monitor import AlarmStop as AlarmStop
