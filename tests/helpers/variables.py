"""The variables that each launcher sets, as they were seen, for one rank of four on two hosts."""

from launched import slurm_variables, torchrun_variables

from pardata.environment._launchers import LaunchInfo


def told(text):
    """Return what ``env`` prints as a dictionary."""
    return dict(line.split("=", 1) for line in text.split())


TORCHRUN = torchrun_variables(3, 4, 37911, MASTER_ADDR="h1") | told(
    "LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=3 ROLE_WORLD_SIZE=4 "
    "TORCHELASTIC_RESTART_COUNT=0 OMP_NUM_THREADS=1"
)
SRUN = slurm_variables(3, 4, None) | told(
    "SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=2(x2) "
    "SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_JOB_ID=81234 SLURM_STEP_ID=2 SLURMD_NODENAME=n2 "
    "SLURM_JOB_NODELIST=n[1-2] SLURM_STEP_NODELIST=n[1-2]"
)
del SRUN["MASTER_PORT"]
# The batch shell of `sbatch -N 2 -n 4`: a plain `python` there inherits all of it.
SBATCH = told(
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_NNODES=2 "
    "SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_ID=81234 SLURM_JOB_NODELIST=n[1-2] SLURM_GTIDS=0"
)
SALLOC = told("SLURM_NTASKS=4 SLURM_JOB_ID=81234 SLURM_JOB_NODELIST=n[1-2]")
OPEN_MPI = told(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_UNIVERSE_SIZE=2 "
    "OMPI_MCA_orte_num_nodes=1 PMIX_RANK=1 PMIX_NAMESPACE=1934360577 PMIX_HOSTNAME=h1"
)
MPICH = told("PMI_RANK=1 PMI_SIZE=2 PMI_FD=9 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
RAY = told(
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 NODE_RANK=0 MASTER_ADDR=192.0.2.2 "
    "MASTER_PORT=41231"
)
# Under `mpirun` in an allocation SLURM's variables are those of its daemon, the same on each rank.
DAEMON = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}

AS_TORCHRUN = LaunchInfo("torchrun", 3, 4, 1, 2, 1, 2, "h1", 37911)
AS_SLURM = LaunchInfo("slurm", 3, 4, 1, 2, 1, 2, "n1", 15000 + 1234 + 2)
AS_MPICH = LaunchInfo("mpi", 1, 2, 1, 2, None, None, "127.0.0.1", 29500)
