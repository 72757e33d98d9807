/* simulate - runs whole clusters, each from a seed, in one process or several. */

#include "deploy/simulate/command.h"

int main(int argc, char **argv)
{
    return sim_command(argc, argv);
}
