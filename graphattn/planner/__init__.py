"""`graphattn plan`: what a deployment holds and how fast it is, from configuration files only.

Plain arithmetic: nothing here imports torch. docs/planner.md says how a prediction is made and how
far it is from a measurement.

    gpu         peak figures of a GPU
    constants   what is assumed beside them, each with its source
    config      a configuration file: a transformers folder's, or one that is shipped
    model       parameters, bytes and operations of a model
    shard       the same on one GPU of a tensor-parallel, context-parallel group
    capacity    KV tokens and sequences that fit
    work        bytes, operations and messages of a step, and their time
    prediction  the configurations that were asked for
    table       as text and as JSON
"""
