//! Where the configuration comes from: the file, and the command line, which has the last word.

use std::path::{Path, PathBuf};

use super::Config;
use super::error::ConfigError;

#[derive(Clone, Debug, Default)]
pub struct ConfigSource {
    /// Without one everything is as by default, but for the command line.
    pub file: Option<PathBuf>,
    pub interfaces: Vec<String>,
    pub socket: Option<PathBuf>,
}

impl ConfigSource {
    /// The configuration as the file has it now, checked.
    pub fn read(&self) -> Result<Config, ConfigError> {
        self.complete(match &self.file {
            Some(path) => Config::read(path)?,
            None => Config::default(),
        })
    }

    /// The same of a text that somebody else has read.
    pub fn parse(&self, text: &str) -> Result<Config, ConfigError> {
        let path = self.file.as_deref().unwrap_or(Path::new("the text"));
        self.complete(Config::parse(path, text)?)
    }

    fn complete(&self, mut config: Config) -> Result<Config, ConfigError> {
        if !self.interfaces.is_empty() {
            config.interfaces.clone_from(&self.interfaces);
        }
        if let Some(socket) = &self.socket {
            config.socket = Some(socket.clone());
        }
        config.check()?;
        Ok(config)
    }
}
