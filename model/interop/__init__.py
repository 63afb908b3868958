"""Convert other people's weights into weights of this repo's modules, and back."""
