"""Process groups: the only folder that imports `torch.distributed`.

What belongs here: who this rank is, which device it owns, and the collectives the model needs. Modules import nothing
else of minieagle. The folder is source, not build output: wheels and archives go to `build/`.
"""
