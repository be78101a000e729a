"""The lab: the planner, and the experiments that tell the story of paged KV memory."""
