//! Every verdict of both filters as a `BPF_PROG_TEST_RUN` fixture, and attaching in a network
//! namespace of its own. All of it needs root.

mod active;
mod attach;
mod bed;
mod budgets;
mod driver;
mod floods;
mod fragments;
mod frames;
mod groups;
mod inheritance;
mod linear;
mod raw;
mod receive;
mod report;
mod transmit;
