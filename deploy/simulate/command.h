#pragma once

/* deploy/simulate/command.h - the command line: runs of many seeds in several processes, what they
 * have shown, and which went wrong. Uses stdout, and stderr for the log alone; main's thread. */

/* Returns the exit status: 0 all runs were good, 1 one was not, 2 the arguments are wrong. */
int sim_command(int argc, char **argv);
