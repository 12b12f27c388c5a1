//! `portolan completions` and the hidden `portolan manual`: output that is generated from the declaration of the
//! command line.

use std::path::PathBuf;

use anyhow::Context;
use clap_complete::Shell;

use crate::exit::{Failure, print};

/// The end of `portolan --help`, and of portolan(1).
pub(crate) const AFTER_OPTIONS: &str = "Environment:
    PORTOLAN_SOCKET  the control socket, as --socket

Files:
    /run/portolan/<namespace>/control  control socket, by the inode of the network namespace

Exit status:
    0  success
    1  failure, or a failed check of doctor
    2  wrong usage
    3  no server answers
    4  qos, ext: the server refuses
    125  run: the program was not started
    126  run: the program cannot be executed
    127  run: the program was not found";

/// The end of `portolan run --help`, and of portolan-run(1).
pub(crate) const AFTER_RUN: &str = "Environment:
    PORTOLAN  auto, require (as --require), or off: the kernel's sockets only
    PORTOLAN_SOCKET  as --socket
    PORTOLAN_SPIN  as --spin
    PORTOLAN_DELEGATE  1 as --delegate; 0: the server performs handshakes whatever its configuration says
    PORTOLAN_DIRECT  1 as --direct; 0: sessions share a ring whatever the server's configuration says
    PORTOLAN_DELIVERY  as --delivery
    PORTOLAN_PRELOAD  the proxy, if it is neither beside portolan nor in ../lib/portolan

Exit status:
    125  the program was not started
    126  the program cannot be executed
    127  the program was not found
    other  that of the program

Examples:
    portolan run -- redis-server --bind 10.0.0.2
    portolan run --spin 50 -- ./server";

#[derive(clap::Args)]
pub(crate) struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn complete(arguments: &Completions, mut command: clap::Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "portolan", &mut script);
    print(String::from_utf8_lossy(&script).trim_end())
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Arguments {
    /// The directory to write the pages to.
    directory: Option<PathBuf>,
    /// Print the command reference in Markdown instead.
    #[arg(long)]
    markdown: bool,
    /// Print the schema of the commands' --json output instead.
    #[arg(long)]
    schema: bool,
}

pub(crate) fn run(arguments: &Arguments, command: clap::Command) -> Result<(), Failure> {
    if arguments.schema {
        return crate::json::print_json(&crate::json::schema());
    }
    let Some(directory) = &arguments.directory else {
        return print(portolan_manual::markdown(&command).trim_end());
    };
    let see_also = [("portolan", 1), ("portoland.toml", 5), ("portoland", 8)];
    portolan_manual::write_pages(command, 1, &see_also, directory)
        .with_context(|| directory.display().to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_reference_is_up_to_date() {
        let page = include_str!("../../../docs/reference/portolan.md");
        let made = portolan_manual::markdown(&crate::Arguments::command());
        assert!(page.ends_with(&made), "`make doc` writes it anew");
    }
}
