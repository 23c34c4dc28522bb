"""From degrees in a config to a mesh."""

from ms_zero.config.schema import RunConfig
from ms_zero.errors import UserError
from ms_zero.mesh import Mesh


def mesh_of(config: RunConfig, world_size: int) -> Mesh:
    """Return the mesh of a config; raises UserError when it does not have `world_size` places."""
    parallel = config.parallel
    mesh = Mesh(
        pp=parallel.pp,
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep,
    )
    if mesh.world_size != world_size:
        raise UserError(
            f"the config is for {mesh.world_size} workers, but {world_size} are running; start that many, or "
            f"load the config for {world_size}"
        )
    return mesh
