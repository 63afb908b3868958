"""Other people's weights: into this repo's modules, and back."""
