"""DeepSpeed's dialect: what its scripts and Hugging Face's libraries import from it, in terms of our own API.

The packages under `as_deepspeed` give these things their places; here is what they are. What is not here is refused.
"""
