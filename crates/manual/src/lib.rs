//! Manual pages and the command reference, generated from the declaration of a command line.
//!
//! The text after the options of `--help` ([`Command::after_long_help`]) becomes sections of the manual
//! page: a line without indentation that ends with a colon is a heading, and an indented line is an entry,
//! whose term and explanation are at least two spaces apart.
#![forbid(unsafe_code)]

mod version;

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;
use roff::{Roff, bold, italic, roman};

pub use version::{release, version};

/// A page that manual pages refer to, such as `("portoland", 8)`.
pub type Reference = (&'static str, u8);

/// Writes `NAME.SECTION` for a command and each of its visible subcommands into a directory, which is created
/// if it does not exist.
pub fn write_pages(
    command: Command,
    section: u8,
    see_also: &[Reference],
    directory: &Path,
) -> io::Result<()> {
    let command = built(command);
    fs::create_dir_all(directory)?;
    write_with_subcommands(&command, None, section, see_also, directory)
}

fn write_with_subcommands(
    command: &Command,
    parent: Option<&str>,
    section: u8,
    see_also: &[Reference],
    directory: &Path,
) -> io::Result<()> {
    let name = page_name(command);
    let mut page = fs::File::create(directory.join(format!("{name}.{section}")))?;
    let related = parent
        .map(|parent| (parent, section))
        .into_iter()
        .chain(see_also.iter().copied())
        .filter(|(other, _)| *other != name)
        .collect::<BTreeSet<_>>();
    page.write_all(&render(command, section, &Vec::from_iter(related))?)?;
    subcommands(command)
        .try_for_each(|sub| write_with_subcommands(sub, Some(name), section, see_also, directory))
}

/// Renders the page of one command.
fn render(command: &Command, section: u8, related: &[(&str, u8)]) -> io::Result<Vec<u8>> {
    let man = Man::new(command.clone())
        .section(section.to_string())
        .manual("Portolan");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command
        .get_arguments()
        .any(|argument| !argument.is_hide_set())
    {
        man.render_options_section(&mut page)?;
    }
    if subcommands(command).next().is_some() {
        man.render_subcommands_section(&mut page)?;
    }
    sections(command).to_writer(&mut page)?;
    references(related).to_writer(&mut page)?;
    Ok(page)
}

/// Renders the text that `--help` shows after the options.
fn sections(command: &Command) -> Roff {
    let mut page = Roff::new();
    let text = command
        .get_after_long_help()
        .or_else(|| command.get_after_help())
        .map(ToString::to_string)
        .unwrap_or_default();
    for line in text.lines() {
        match (line.strip_suffix(':'), line.trim_start().split_once("  ")) {
            _ if line.trim().is_empty() => page.control("PP", []),
            (Some(heading), _) if !line.starts_with(' ') => {
                page.control("SH", [heading.to_uppercase().as_str()])
            }
            (_, Some((term, explanation))) if line.starts_with(' ') => page
                .control("TP", [])
                .text([bold(term)])
                .text([roman(explanation.trim_start())]),
            _ if line.starts_with(' ') => page.control("br", []).text([roman(line.trim())]),
            _ => page.text([roman(line)]),
        };
    }
    page
}

fn references(related: &[(&str, u8)]) -> Roff {
    let mut page = Roff::new();
    if related.is_empty() {
        return page;
    }
    page.control("SH", ["SEE ALSO"]);
    for (index, (name, section)) in related.iter().enumerate() {
        let comma = if index + 1 < related.len() { "," } else { "" };
        page.text([italic(*name), roman(format!("({section}){comma}"))]);
    }
    page
}

/// Returns the command reference in Markdown.
pub fn markdown(command: &Command) -> String {
    let options = clap_markdown::MarkdownOptions::new()
        .show_footer(false)
        .show_table_of_contents(false);
    let text = clap_markdown::help_markdown_command_custom(command, &options);
    // The text before the first command is only a title.
    let introduction = text.find("## ").unwrap_or(0);
    with_code_blocks(text[introduction..].trim_end())
}

/// Inserts empty lines before indented lines, which Markdown needs to take them for a code block.
fn with_code_blocks(text: &str) -> String {
    let mut page = String::new();
    let mut after_heading = false;
    for line in text.lines() {
        if after_heading && line.starts_with("    ") {
            page.push('\n');
        }
        after_heading = line.ends_with(':');
        page.push_str(line.trim_end());
        page.push('\n');
    }
    page
}

/// Returns the command with the full names of its subcommands, without the `help` subcommands that clap would add.
fn built(command: Command) -> Command {
    fn without_help(command: Command) -> Command {
        command
            .disable_help_subcommand(true)
            .mut_subcommands(without_help)
    }
    let mut command = without_help(command);
    command.build();
    command
}

fn page_name(command: &Command) -> &str {
    command
        .get_display_name()
        .unwrap_or_else(|| command.get_name())
}

fn subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|sub| !sub.is_hide_set())
}

#[cfg(test)]
mod tests {
    use clap::{Arg, Command};

    use super::*;

    fn command() -> Command {
        Command::new("net")
            .about("Does things")
            .subcommand(
                Command::new("send")
                    .about("Send a packet")
                    .arg(Arg::new("count").long("count").help("How many packets"))
                    .after_long_help("Exit status:\n    0  sent\n    1  lost\n\nNothing else."),
            )
            .subcommand(Command::new("internal").hide(true))
    }

    fn page(name: &str) -> String {
        let command = built(command());
        let command = match name {
            "net" => &command,
            name => command.find_subcommand(name).expect("it is declared"),
        };
        String::from_utf8(render(command, 1, &[("net", 1), ("ss", 8)]).unwrap()).unwrap()
    }

    #[test]
    fn a_page_lists_the_visible_subcommands_alone() {
        let page = page("net");
        assert!(page.contains("send"), "{page}");
        assert!(!page.contains("internal"), "{page}");
        assert!(!page.contains("net\\-help"), "{page}");
    }

    #[test]
    fn headings_and_entries_become_sections() {
        let page = page("send");
        assert!(page.contains(".SH \"EXIT STATUS\""), "{page}");
        assert!(page.contains(".TP\n\\fB0\\fR\nsent"), "{page}");
        assert!(page.contains("\\fInet\\fR(1),\n\\fIss\\fR(8)"), "{page}");
    }

    #[test]
    fn the_reference_has_every_visible_command() {
        let text = markdown(&command());
        assert!(text.starts_with("## `net`"), "{text}");
        assert!(text.contains("## `net send`"), "{text}");
        assert!(text.contains("Exit status:\n\n    0  sent"), "{text}");
        assert!(!text.contains("internal"), "{text}");
        assert!(!text.contains("net help"), "{text}");
    }
}
