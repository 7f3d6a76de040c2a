"""Kernels for the CPU, compiled by Numba. Imported only where Numba is.

Words that mean the same in every file of this folder. First, sizes:

========  =========================================================================================
unit      four bytes, what one lane holds in a product: one float32, two bfloat16, four bytes
column    the weights of 16 outputs (or of 16 ranks of an adapter), packed: one vector for each unit
          of inputs, with the 16 outputs side by side. Two neighbouring columns are a *pair*
group     16 tokens of one KV head in the cache (``cache_groups``). In ``four_bit_kernel`` and
          ``rounding_kernel`` alone: the inputs that share a scale, as in ``quantization``
span      256 keys: one turn of the online softmax
split     512 keys, after which the softmax begins anew (as in split-K). The splits of a decode are
          computed side by side
item      what a thread takes from a kernel's counter at a time; each kernel says what its items are
========  =========================================================================================

Two more are the processor's: a *vector* is 16 lanes of four bytes, 64 bytes; a *tile* is a register
of AMX, 16 vectors, 1,024 bytes.

Then, names of arguments:

===========  ======================================================================================
tag          a value whose *type* says which elements a kernel is compiled for (``simd``)
call         the arguments of a kernel, read from the record that the host filled (``compiled``)
rows         rows of x, or (token, query head) pairs of attention: what one kernel call works on
padded       the head size in the cache: the model's, filled up with zeros to a multiple of 16
shaped       for how many rows this thread's tiles are set at the moment, 0 if they are not. Who may
             change that takes it and returns it
spare        memory that is overwritten
..._body     the function that every thread of a kernel runs: takes items until none is left
===========  ======================================================================================

The order of reading: each file builds on those above it, and says who calls it::

    emit             LLVM code by a builder, as Numba functions       } how kernels are written
    processor        which instruction sets there are forms for       }
    simd             vectors, memory and element types                }
    compiled         records, machine code, threads                   }

    amx, dot         instructions: tiles; products of units           } the products that all
    micro_kernel     a few rows times a few vectors, in registers     } others are made of

    cache_groups     16 tokens in the cache                           } attention
    attention_plan   a step cut into entries                          }
    attention_records  arguments and scratch memory                   }
    cache_blocks     blocks of the paged cache as groups              }
    softmax          the online softmax of a row                      }
    attention_rows   a few rows against a span of keys                }
    attention_kernel   items of the plan, their splits                }
    paged_attention  the attention function "cpu"                     }

    rounding_kernel  x in another form before a product               } linear layers
    product_kernel   x times packed weights                           }
    four_bit_kernel  the same of 4 bits                               }
    tile_linear      packs weights, calls these three                 }
    linear           oneDNN's packed product instead                  }

    norm_kernel      RMS norm and rotary embedding                    } all that a layer has
    adapter_table, adapter_kernel   LoRA                              }
    program_kernel, program_list, program   all layers as one call    }

    layer_kernels    what fused modules are made with                 } the way in
    accelerator      what a load takes                                }
    ahead            the attention kernel compiled in another process }
"""
