//! Writes docs/reference/requirements.md.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use portolan_requirements::{PAGE, Survey, root};

fn main() -> ExitCode {
    let survey = match Survey::of(&root()) {
        Ok(survey) => survey,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    for complaint in survey.complaints() {
        eprintln!("{complaint}");
    }
    match std::fs::write(root().join(PAGE), survey.page()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{PAGE}: {error}");
            ExitCode::FAILURE
        }
    }
}
