"""Every configuration that ships, by name."""

import shipped_attention
import shipped_elementwise

BY_NAME = {
    one.name: one
    for one in (*shipped_attention.CONFIGURATIONS, *shipped_elementwise.CONFIGURATIONS)
}
