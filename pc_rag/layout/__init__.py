"""From token counts to spans, and from a prompt to the plan of its request. Pure integers."""
