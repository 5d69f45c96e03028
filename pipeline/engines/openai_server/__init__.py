"""The OpenAI API, with attention, served from `transformers`: for trying and testing on a CPU."""
