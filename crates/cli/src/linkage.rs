//! Finds out which C library a program is linked to. The proxy interposes the symbols of glibc, so it works only in
//! programs that glibc's loader loads.

use std::env;
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};

use object::Endianness;
use object::elf::{FileHeader64, PT_LOAD, ProgramHeader64};
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::read::{ReadCache, ReadRef};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Linkage {
    /// Linked to glibc, or a script, whose interpreter is not checked.
    Glibc,
    /// Another loader, which lacks glibc's symbols and would refuse to start the program with the proxy.
    Other,
    Static,
    /// A Go program calls the kernel itself, even if it is linked to glibc.
    Go,
}

/// Returns how the program is linked that the shell would run by this name.
pub(crate) fn of_program(name: &OsStr) -> Linkage {
    let file = find(name).and_then(|path| File::open(path).ok());
    file.map_or(Linkage::Glibc, |file| of_image(&ReadCache::new(file)))
}

pub(crate) fn find(name: &OsStr) -> Option<PathBuf> {
    if Path::new(name).components().count() > 1 {
        return Some(name.into());
    }
    let directories = env::var_os("PATH")?;
    env::split_paths(&directories)
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

/// Leaves to the loader what is no 64-bit ELF image (elf(5)), or is cut off.
fn of_image<'a>(image: impl ReadRef<'a>) -> Linkage {
    parse(image).unwrap_or(Linkage::Glibc)
}

/// Decides by the notes of the linker, then by the interpreter that the image requests.
fn parse<'a>(image: impl ReadRef<'a>) -> object::read::Result<Linkage> {
    let header = FileHeader64::<Endianness>::parse(image)?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, image)?;
    for segment in segments {
        let Some(mut notes) = segment.notes(endian, image)? else {
            continue;
        };
        while let Some(note) = notes.next()? {
            if note.name() == b"Go" {
                return Ok(Linkage::Go);
            }
        }
    }
    for segment in segments {
        if let Some(interpreter) = segment.interpreter(endian, image)? {
            return Ok(if contains(interpreter, b"ld-linux") {
                Linkage::Glibc
            } else {
                Linkage::Other
            });
        }
    }
    let is_loaded = |segment: &ProgramHeader64<_>| segment.p_type(endian) == PT_LOAD;
    Ok(if segments.iter().any(is_loaded) {
        Linkage::Static
    } else {
        Linkage::Glibc
    })
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes an image with one program header, followed by `text`.
    fn image(kind: u32, text: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 64 + 56];
        // 64 bits, little-endian, version 1.
        image[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        image[32] = 64;
        image[54] = 56;
        image[56] = 1;
        image[64..68].copy_from_slice(&kind.to_le_bytes());
        image[72] = 120;
        image[96] = text.len() as u8;
        image.extend_from_slice(text);
        image
    }

    #[test]
    fn an_interpreter_tells_the_c_library() {
        let glibc = image(3, b"/lib64/ld-linux-x86-64.so.2\0");
        assert_eq!(of_image(glibc.as_slice()), Linkage::Glibc);
        let musl = image(3, b"/lib/ld-musl-x86_64.so.1\0");
        assert_eq!(of_image(musl.as_slice()), Linkage::Other);
        assert_eq!(of_image(image(1, b"").as_slice()), Linkage::Static);
    }

    #[test]
    fn a_note_of_its_linker_tells_a_go_program() {
        let note = |name: &[u8]| [b"\x04\0\0\0\x04\0\0\0\x04\0\0\0", name, b"id\0\0"].concat();
        let go = image(4, &note(b"Go\0\0"));
        assert_eq!(of_image(go.as_slice()), Linkage::Go);
        let gnu = image(4, &note(b"GNU\0"));
        assert_eq!(of_image(gnu.as_slice()), Linkage::Glibc);
    }

    #[test]
    fn what_is_no_program_or_cut_off_is_left_to_the_kernel() {
        assert_eq!(of_image(b"#!/bin/sh\n".as_slice()), Linkage::Glibc);
        let musl = image(3, b"/lib/ld-musl-x86_64.so.1\0");
        for length in 0..musl.len() {
            of_image(&musl[..length]);
        }
    }

    #[test]
    fn programs_are_found_as_the_shell_does() {
        assert_eq!(find(OsStr::new("./x")), Some("./x".into()));
        assert!(find(OsStr::new("sh")).is_some_and(|path| path.is_absolute()));
        assert_eq!(of_program(OsStr::new("env")), Linkage::Glibc);
    }
}
