//! Man pages.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

/// Lines are not stretched to the right margin and words not divided, because paths and options are
/// long.
const LAYOUT: &str = ".ad l\n.nh\n";

/// Writes the page of `command` and those of its subcommands, `NAME-SUBCOMMAND.SECTION` and so on,
/// into `directory`.
pub fn write(command: Command, section: &str, directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write_built(&command, section, directory)
}

fn write_built(command: &Command, section: &str, directory: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|each| !each.is_hide_set()) {
        write_built(subcommand, section, directory)?;
    }
    let source = format!("Ebb {}", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).section(section).source(source).manual("Ebb");
    page(command, &man, &mut File::create(directory.join(man.get_filename()))?)
}

fn page(command: &Command, man: &Man, to: &mut impl Write) -> io::Result<()> {
    man.render_title(to)?;
    to.write_all(LAYOUT.as_bytes())?;
    man.render_name_section(to)?;
    man.render_synopsis_section(to)?;
    man.render_description_section(to)?;
    if command.get_arguments().any(|each| !each.is_hide_set()) {
        let mut options = Vec::new();
        man.render_options_section(&mut options)?;
        to.write_all(breakable(&String::from_utf8_lossy(&options)).as_bytes())?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(to)?;
    }
    if let Some(notes) = command.get_after_long_help().or(command.get_after_help()) {
        notes_section(&notes.to_string()).to_writer(to)?;
    }
    Ok(())
}

/// Allows line breaks within the long forms of options' values, such as `path=FILE[,bus=a|b]`.
fn breakable(roff: &str) -> String {
    let mut text = String::with_capacity(roff.len());
    for (at, letter) in roff.char_indices() {
        if letter == '[' && roff[at..].starts_with("[,") {
            text.push_str("\\:");
        }
        text.push(letter);
        if letter == '|' {
            text.push_str("\\:");
        }
    }
    text
}

/// The text below a command's help. Paragraphs with indented lines, which are examples, keep their
/// lines.
fn notes_section(text: &str) -> Roff {
    let mut notes = Roff::new();
    notes.control("SH", ["NOTES"]);
    for paragraph in text.split("\n\n") {
        notes.control("PP", []);
        let as_it_is = paragraph.lines().any(|line| line.starts_with(' '));
        if as_it_is {
            notes.control("nf", []);
        }
        for line in paragraph.lines() {
            notes.text([roman(line)]);
        }
        if as_it_is {
            notes.control("fi", []);
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_in_forms_of_values() {
        assert_eq!(breakable("\\fI<tcp:A|b[,c=d]>"), "\\fI<tcp:A|\\:b\\:[,c=d]>");
        assert_eq!(breakable(".TP\na, b"), ".TP\na, b");
    }

    #[test]
    fn only_examples_keep_their_lines() {
        let notes = notes_section("Two\nlines.\n\nExample: a \\\n         --b").render();
        let body = notes.split_once(".SH NOTES\n").unwrap().1;
        assert_eq!(body, ".PP\nTwo\nlines.\n.PP\n.nf\nExample: a \\\\\n         \\-\\-b\n.fi\n");
    }
}
