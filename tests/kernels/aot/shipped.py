"""Every configuration that ships, by name."""

import shipped_attention
import shipped_elementwise
import shipped_sampling

FAMILIES = (shipped_attention, shipped_elementwise, shipped_sampling)
BY_NAME = {one.name: one for family in FAMILIES for one in family.CONFIGURATIONS}
