"""The value model under verl's name; it stands beside the policy, whose model may have the values, too."""

from workers.dp_actor import DataParallelPPOCritic as DataParallelPPOCritic
