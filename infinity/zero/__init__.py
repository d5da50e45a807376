"""ZeRO as placements: units and their lifecycle, and the hooks that drive it."""
